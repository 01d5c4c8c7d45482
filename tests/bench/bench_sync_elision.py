"""How much faster sync-elision fills the lengths than the real methods of real releases.

    python tests/bench/bench_sync_elision.py [--rounds N] [--json]

Every number is a ratio of two timings taken in turn, in one process, in CPU time of one thread:
upstream's method, then the same release with the pass installed by the framework (so its wrapper is
paid for), again and again; the median of the rounds' ratios, with their 10th and 90th percentile.
Upstream's waits are free here, since nothing has to arrive: what is compared is the host's work.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT), str(ROOT / "passes")]

import torch  # noqa: E402
from compat.light import fake_device, installed, load, make_output  # noqa: E402
from compat.patching import patch  # noqa: E402

from ascend_opt_passes.sync_elision import SyncElision  # noqa: E402

METHODS = {"0.26.0rc1": "waits", "0.27.1rc1": "#13382", "0.30.0rc2": "latest"}
SIZES = (1, 8, 64, 144, 256, 1024)
TARGETS = {("any", 144): 50, ("steady", 144): 300, ("steady", 1024): 1000, ("any", 1): 1}


class Case:
    """One release's runner with a running batch.

    Args:
        version: The release.
        num_reqs: Requests in the batch.
        batch: `steady`: one token each and nothing else. `unpickled`: the same, but each step has
            strings of its own, as in a worker that gets its steps from another process (with
            several ranks); comparing them costs more. `any`: a mixed batch, in which one request
            in eight is new, one computes a chunk, and the order is never last step's.
    """

    def __init__(self, version: str, num_reqs: int, batch: str) -> None:
        steady = batch != "any"
        self.unpickled = batch == "unpickled"
        self.release = load(version)
        self.runner = self.release.runner(num_reqs + 8)
        ids = [f"chatcmpl-{i:032x}" for i in range(num_reqs)]
        news = [SimpleNamespace(req_id=r, num_computed_tokens=1000 + i) for i, r in enumerate(ids)]
        self.runner.update_states(make_output({}, [], [], news))
        new = set() if steady else set(ids[::8] if num_reqs > 1 else ids)
        scheduled = {r: 1 if steady or i % 8 != 1 else 64 for i, r in enumerate(ids)}
        cached = [r for r in ids if r not in new]
        counts = [1001 + i for i, r in enumerate(ids) if r not in new]
        self.output = make_output(scheduled, cached, counts, [n for n in news if n.req_id in new])
        # As vLLM's update_requests has left it by then.
        for req_id, count in zip(cached, counts, strict=True):
            row = self.runner.req_states.req_id_to_index[req_id]
            self.runner.req_states.num_computed_tokens_np[row] = count
        order = sorted(ids, key=lambda r: (scheduled[r] != 1, scheduled[r]))
        self.orders = [order] if steady else [order[i:] + order[:i] for i in range(3)]

    def timed(self, calls: int) -> float:
        """Return CPU seconds for one call of the method, over `calls` calls."""
        method, output, orders = self.runner._update_seq_lens_cpu, self.output, self.orders
        kinds = len(orders)
        # As in an engine, every step has a list of its own, of the scheduler's own strings.
        lists = [list(orders[i % kinds]) for i in range(calls)]
        if self.unpickled:
            lists = [[req_id.encode().decode() for req_id in req_ids] for req_ids in lists]
        start = time.thread_time()
        for req_ids in lists:
            method(output, req_ids)
        return (time.thread_time() - start) / calls


def compare(version: str, num_reqs: int, batch: str, rounds: int) -> dict[str, Any]:
    """Measure one release and one batch: upstream's method and ours, in turn."""
    upstream, ours = Case(version, num_reqs, batch), Case(version, num_reqs, batch)
    with installed(ours.release):
        instance = SyncElision()
        patch(ours.release, instance)
        _agree(upstream, ours)
        slow_calls, fast_calls = _calls(upstream.timed), _calls(ours.timed)
        gc.disable()
        pairs = [(upstream.timed(slow_calls), ours.timed(fast_calls)) for _ in range(rounds)]
        gc.enable()
    assert (instance.counters["rows_kept"] > 0) == (batch != "any")
    ratios = sorted(a / b for a, b in pairs)
    return {
        "release": version,
        "batch": batch,
        "num_reqs": num_reqs,
        "upstream_us": 1e6 * statistics.median(a for a, _ in pairs),
        "ours_us": 1e6 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
    }


def _agree(upstream: Case, ours: Case) -> None:
    counts = upstream.runner.req_states
    upstream.runner.num_computed_tokens_cpu.tensor.copy_(
        torch.from_numpy(counts.num_computed_tokens_np)
    )
    for case in (upstream, ours):
        case.timed(2)
    one, other = upstream.runner.input_buffers, ours.runner.input_buffers
    assert (one.seq_lens_np == other.seq_lens_np).all(), "compare equals with equals"


def _calls(timed: Callable[[int], float]) -> int:
    return min(300, max(3, int(5e-3 / timed(3))))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_device():
        rows = [
            compare(version, num_reqs, batch, options.rounds)
            for batch in ("any", "steady", "unpickled")
            for version in METHODS
            for num_reqs in SIZES
        ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'batch':10} {'release':10} {'requests':>8} {'upstream':>11} {'pass':>10} ", end="")
    print(f"{'ratio':>7}  10%..90%      target")
    for row in rows:
        target = TARGETS.get((row["batch"], row["num_reqs"]))
        print(
            f"{row['batch']:10} {row['release']:10} {row['num_reqs']:8} "
            f"{row['upstream_us']:8.1f} us {row['ours_us']:7.2f} us {row['ratio']:6.1f}x "
            f" {row['low']:.1f}..{row['high']:.1f}  {f'>= {target}x' if target else ''}"
        )


if __name__ == "__main__":
    main()
