"""bench --trace in the real vllm-ascend: the waits and prefetches of each step are marked."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ascend_opt import registry
from ascend_opt.controller import make_request
from ascend_opt.proof.bench import Candidate, Load, Plan, bench
from ascend_opt.proof.model import resolve_model
from ascend_opt.proof.runner import Runner, Subject
from ascend_opt.proof.tracing import STEPS
from ascend_opt.proof.workspace import Progress, Workspace
from ascend_opt.simnpu.installation import Installation

ENGINE = (
    *("--max-model-len=64", "--max-num-seqs=4", "--max-num-batched-tokens=64"),
    *("--gpu-memory-utilization=0.2", "--num-gpu-blocks-override=16"),
)
pytestmark = pytest.mark.extended  # two engines; names and marks are tested in tests/unit

UPDATE = "ascend_opt: sync-elision: NPUModelRunner._update_seq_lens_cpu"
COPY = "ascend_opt: sync-elision: NPUModelRunner._copy_num_computed_tokens_to_cpu"
WAIT = "ascend_opt: sync-elision: wait"
PREFETCH = "ascend_opt: prefetch"


@pytest.fixture(scope="module")
def traces(
    installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The events of both arms, sync-elision and mlp-prefetch together."""
    if installation.release.name != "0.26.0rc1":
        pytest.skip("one release is enough: the one that waits for the device in every step")
    directory = tmp_path_factory.mktemp("trace")
    given = {"sync-elision": {}, "mlp-prefetch": {"where": "eager"}}
    requests = {
        name: make_request(registry.discover().get(name), parameters)
        for name, parameters in given.items()
    }
    python = (sys.executable, "-m", "ascend_opt", "simnpu", "run", "--", "python")
    workspace = Workspace(str(directory / "out"), "bench")
    model = resolve_model("tiny", workspace.scratch)
    runner = Runner(Subject(model, ENGINE, python), workspace, Progress("bench", live=False))
    plan = Plan((Load(2, 4, STEPS + 3),), 6, trace=directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ascend_opt.proof.bench.SETTLE_S", 0.0)
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        found = bench(runner, [Candidate("both", requests)], plan)
    assert not found.notes
    assert list(found.traces) == ["both", "unpatched"]
    return {
        what: json.loads(Path(path).read_text())["traceEvents"]
        for what, path in found.traces.items()
    }


def names(events: list[dict[str, Any]]) -> Counter[str]:
    """Count the marks; a step's tells apart what was counted in it, not its number."""
    marks = [e["name"] for e in events if e["name"].startswith("ascend_opt: ") and e["ph"] != "M"]
    return Counter(
        "step" + mark.partition("step")[2][2:] if "step " in mark else mark for mark in marks
    )


def test_the_wait_is_marked_where_it_is_and_where_it_was(
    traces: dict[str, list[dict[str, Any]]],
) -> None:
    """One wait a step in the methods that sync-elision patches; the same methods without it."""
    unpatched, patched = names(traces["unpatched"]), names(traces["both"])
    assert unpatched == {"step": STEPS, UPDATE: STEPS, COPY: STEPS, WAIT: STEPS}
    assert patched[UPDATE] == patched[COPY] == STEPS
    assert WAIT not in patched
    waits = [e for e in traces["unpatched"] if e["name"] == WAIT]
    assert {e["args"]["call"] for e in waits} == {"sync_event"}
    assert all("model_runner.py" in e["args"]["at"] for e in waits)


def test_prefetches_are_marked(traces: dict[str, list[dict[str, Any]]]) -> None:
    """Two a layer and step, and the step says how many; delivered late, nothing waits for them."""
    patched = traces["both"]
    prefetches = [e for e in patched if e["name"] == PREFETCH]
    assert Counter(e["ph"] for e in prefetches) == {"i": 8 * STEPS}
    assert {e["args"]["call"] for e in prefetches} == {"cmo_async"}
    did = ": sync-elision held +1, mlp-prefetch prefetches +8"
    assert names(patched)[f"step{did}"] == STEPS
