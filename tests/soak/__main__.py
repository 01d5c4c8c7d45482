"""Two servers under the same random load for a while, one of them with passes.

    python -m soak cpu --minutes 20
    python -m soak npu-b --minutes 20

`tox run -e soak` runs both, each in its environment; docs/testing.md says what is held. Exit code
1 if anything is wrong. Equal seeds give equal requests, but never equal batches.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from soak import planted, verdict
from soak.engines import ENGINES, Engine
from soak.memory import MIB, slope
from soak.run import ServerGoneError, Soak
from soak.traffic import requests
from soak.twins import twin
from soak.verdict import GENERATED, PREEMPTIONS, PREFIX_HITS, Effect

from ascend_opt import render
from ascend_opt.tiny import write_tiny_model

MOST_SHOWN = 20  # of what is wrong

say = partial(print, flush=True)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    description, *_ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m soak", description=description)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--minutes", type=float, default=20, help="for which requests arrive")
    parser.add_argument("--seed", type=int, help="of the requests; drawn and printed if left out")
    parser.add_argument("--rate", type=float, help="requests a second; the engine's if left out")
    second = parser.add_mutually_exclusive_group()
    second.add_argument(
        "--unpatched-twice",
        action="store_true",
        help="no pass in either server: what two equal servers differ by",
    )
    second.add_argument(
        "--plant",
        choices=planted.FAULTS,
        action="append",
        help="add a faulty pass: does the soak find it? May be given twice",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    chosen = options(arguments)
    # Wherever it was started, and whoever ends it: the servers are sessions of their own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    engine = ENGINES[chosen.engine]
    seed = secrets.randbelow(1 << 32) if chosen.seed is None else chosen.seed
    directory = Path(tempfile.mkdtemp(prefix=f"soak-{chosen.engine}-"))
    say(f"{chosen.engine}: {chosen.minutes:g} minutes, seed {seed}, logs in {directory}")
    asked: Mapping[str, Any] | None = engine.passes
    active: Mapping[str, Effect] = engine.active
    environ: dict[str, str] = {}
    if chosen.unpatched_twice:
        asked, active = None, {}
    if chosen.plant:
        planted.install(directory / "planted")
        asked = {**engine.passes, **{fault: {} for fault in chosen.plant}}
        paths = (str(directory / "planted"), os.environ.get("PYTHONPATH", ""))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    findings = soak(engine, asked, active, environ, directory, seed, chosen)
    if findings:
        say(f"WRONG ({len(findings)}):", *findings[:MOST_SHOWN], sep="\n  ")
        say(f"Repeat the requests with --seed {seed}; the servers' logs are in {directory}")
        return 1
    shutil.rmtree(directory)
    say("nothing is wrong")
    return 0


def soak(
    engine: Engine,
    asked: Mapping[str, Any] | None,
    active: Mapping[str, Effect],
    environ: Mapping[str, str],
    directory: Path,
    seed: int,
    chosen: argparse.Namespace,
) -> list[str]:
    """Run one soak and print its summary; return what is wrong."""
    model = write_tiny_model(directory / "tiny-qwen3")
    start = partial(twin, engine, model=model, directory=directory, environ=environ)
    with (
        ThreadPoolExecutor(2 * engine.outstanding) as pool,
        start("unpatched", passes=None) as unpatched,
        start("patched", passes=asked) as patched,
    ):
        run = Soak(unpatched, patched, active, chosen.minutes, engine.outstanding, pool, say)
        try:
            run.run(requests(seed, chosen.rate or engine.rate))
            findings = list(verdict.mute_passes(patched.passes(), asked or {}))
        except ServerGoneError as error:
            findings = [str(error)]
        except KeyboardInterrupt:
            # From a terminal it comes twice, by itself and through tox: the servers have to end.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            findings = ["interrupted"]
        summarise(run)
        return findings + list(run.findings())


def summarise(run: Soak) -> None:
    """Print what was done and what was held."""
    c = run.comparison
    console = render.console()
    done = [
        ("pairs of requests", c.requests),
        ("cancelled by the client", c.cancelled),
        ("tokens compared", c.tokens),
        ("ties", c.ties),
        ("tokens with log probabilities", c.logprobs),
        ("largest difference of those", f"{c.drift:.1e}"),
    ]
    console.print(render.table("Requests", ("", ""), done))
    rows = []
    for server in (run.unpatched, run.patched):
        first, last = (server.samples[i] for i in (0, -1))
        metrics = server.metrics() if server.healthy() else {}
        counts = [metrics.get(name, "?") for name in (GENERATED, PREEMPTIONS, PREFIX_HITS)]
        half = verdict.second_half(server.samples)
        sizes = [f"{held.memory / MIB:.1f}" for held in (first, half[0], last)]
        rate = f"{slope(half) / MIB:+.3f}"
        rows.append((server.name, *counts, *sizes, rate, last.handles, last.threads))
    counted = ("server", "tokens", "preemptions", "prefix hits")
    weighed = ("MiB at first", "half-way", "in the end", "MiB a minute, second half")
    headings = (*counted, *weighed, "handles", "threads")
    console.print(render.table("Servers", headings, rows))
    passes = [
        (
            status.name,
            status.state,
            ", ".join(f"{name} {value}" for name, value in status.counters.items()),
            status.reason,
        )
        for status in run.patched.passes()
    ]
    console.print(render.table("Passes", ("pass", "state", "counters", "reason"), passes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
