"""mlp-prefetch on the simulated device: real vLLM, vllm-ascend and torch_npu, late delivery."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from npu import prefetch_program
from npu.conftest import Simulate, read_result

from ascend_opt.simnpu import trace
from ascend_opt.simnpu.trace import Record
from ascend_opt.tiny import HIDDEN, INTERMEDIATE

LAYERS = 4
A_STEP = 2 * LAYERS
GATE_UP, DOWN = 2 * INTERMEDIATE * HIDDEN * 4, INTERMEDIATE * HIDDEN * 4  # float32
BYTES_A_STEP = LAYERS * (GATE_UP + DOWN)
SIZES = {"cudagraph_capture_sizes": [1, 2]}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full-graph": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", **SIZES}},
    "default": {"compilation_config": SIZES},
}
BOTH = {"where": "both"}
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def run(simulate: Simulate, tiny_model: Path, traces: Path) -> Run:
    """Run an engine, once for equal arguments."""
    results: dict[str, dict[str, Any]] = {}

    def once(
        keywords: dict[str, Any],
        parameters: dict[str, Any] | None,
        *lengths: int,
        name: str = "",
        **environ: str,
    ) -> dict[str, Any]:
        key = json.dumps([keywords, parameters, lengths, environ])
        if key not in results:
            if name:
                (traces / name).mkdir()
            done = simulate(
                Path(prefetch_program.__file__),
                str(tiny_model),
                json.dumps(keywords),
                json.dumps(parameters),
                *map(str, lengths),
                trace=traces / name if name else None,
                environ={
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_USE_V2_MODEL_RUNNER": "1",
                    "VLLM_ASCEND_OPT": "",
                    **environ,
                },
            )
            results[key] = read_result(done)
        return results[key]

    return once


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def patched(mode: str, run: Run) -> dict[str, Any]:
    return run(MODES[mode], BOTH, name=mode)


def decode(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the decode steps: after the prefill, before the step that only tidies up."""
    return result["steps"][1 : prefetch_program.NUM_TOKENS]


def test_a_decode_step_prefetches_each_weight_once(mode: str, run: Run) -> None:
    """2 x layers prefetches of all MLP bytes a step: called in eager mode, replayed by graphs."""
    result = patched(mode, run)
    assert result["state"] == "active"
    steps = [
        (s["prefetches"], s["bytes"], s["replayed"], s["replayed_bytes"]) for s in decode(result)
    ]
    once = (A_STEP, BYTES_A_STEP)
    expected = (*once, 0, 0) if mode == "eager" else (0, 0, *once)
    assert steps == [expected] * (prefetch_program.NUM_TOKENS - 1)


def test_each_size_is_captured_with_its_prefetches(run: Run) -> None:
    """Both captured sizes were decided once, held, and recorded 2 x layers prefetches."""
    counters = patched("full-graph", run)["counters"]
    assert counters["captured_sizes"] == counters["captured_sizes_held"] == len([1, 2])


def test_tokens_are_those_of_the_unpatched_engine(mode: str, run: Run) -> None:
    """Greedy fp32 tokens are equal, with late delivery."""
    assert patched(mode, run)["tokens"] == run(MODES[mode], None)["tokens"]


def test_the_model_runs_the_same_kernels(mode: str, run: Run) -> None:
    """As many kernels a step as unpatched: every fusion of vllm-ascend still matches."""
    kernels = [step["kernels"] for step in run(MODES[mode], None)["steps"]]
    assert [step["kernels"] for step in patched(mode, run)["steps"]] == kernels


def ours(records: list[Record], call: str) -> list[Record]:
    return [r for r in records if r.kind == "call" and r.call == call and "devices.py" in r.at]


def test_one_side_stream_prefetches(mode: str, run: Run, traces: Path) -> None:
    """All prefetches are on one stream, on which no kernel ever runs."""
    patched(mode, run)
    records = trace.read(traces / mode)
    streams = {record.stream for record in ours(records, "cmo_async")}
    assert len(streams) == 1
    kernels = {r.stream for r in records if r.kind == "call" and r.call == "kernel"}
    assert not streams & kernels


def test_a_prefetch_lies_between_its_trigger_and_what_hides_it(
    mode: str, run: Run, traces: Path
) -> None:
    """Matmul, record, wait, prefetch, then RMSNorm for gate_up or SwiGLU for down."""
    patched(mode, run)
    calls = [r for r in trace.read(traces / mode) if r.kind == "call"]
    seen = []
    for i, record in enumerate(calls):
        if record.call != "cmo_async":
            continue
        recorded, waited = calls[i - 2], calls[i - 1]
        assert (recorded.call, waited.call) == ("record_event", "stream_wait_event")
        assert recorded.stream == calls[i - 3].stream != record.stream == waited.stream
        after = next(r for r in calls[i:] if r.call == "kernel")
        seen.append((calls[i - 3].name, record.bytes, after.name))
    norms = {after for _, size, after in seen if size == GATE_UP}
    others = {after for _, size, after in seen if size == DOWN}
    assert {size for _, size, _ in seen} == {GATE_UP, DOWN}
    assert {before for before, _, _ in seen} <= {"aten::matmul", "aten::mm", "aten::linear"}
    assert all("rms_norm" in name for name in norms), norms
    assert all("swiglu" in name for name in others), others


@pytest.mark.parametrize("mode", ["full-graph", "default"])
def test_every_capture_is_joined(mode: str, run: Run, traces: Path) -> None:
    """Each captured graph or piece with prefetches waits for the side stream before it ends."""
    patched(mode, run)
    records = trace.read(traces / mode)
    captured = [r for r in ours(records, "cmo_async") if r.captured]
    side = captured[0].stream
    joins = [r for r in ours(records, "stream_wait_event") if r.captured and r.stream != side]
    graphs = len(captured) // A_STEP  # whole graphs
    assert len(joins) >= graphs > 0
    if mode == "full-graph":
        assert len(joins) == graphs == 2


def test_the_default_prefetches_nothing_in_eager_mode(run: Run) -> None:
    """where=graph on an eager engine is inapplicable, says so, and no call reaches the driver."""
    result = run(MODES["eager"], {})
    assert result["state"] == "inapplicable"
    assert "enforce_eager" in result["reason"]
    assert result["start"]["prefetches"] == 0
    assert [step["prefetches"] for step in result["steps"]] == [0] * len(result["steps"])


def test_the_default_leaves_the_eager_prefill_of_a_graph_engine_alone(run: Run) -> None:
    """where=graph: the prefill prefetches nothing, decode replays all; tokens are the same."""
    result = run(MODES["full-graph"], {})
    assert result["steps"][0]["prefetches"] == 0
    assert [step["replayed"] for step in decode(result)] == [A_STEP] * len(decode(result))
    assert result["tokens"] == run(MODES["full-graph"], None)["tokens"]


def test_large_batches_are_left_alone(run: Run) -> None:
    """None for a 600-token prefill nor in the captured size of 512; decode prefetches all."""
    keywords = {
        "compilation_config": {"cudagraph_capture_sizes": [1, 512]},
        "max_model_len": 1024,
        "max_num_batched_tokens": 640,
    }
    result = run(keywords, BOTH, 600)
    assert (result["counters"]["captured_sizes"], result["counters"]["captured_sizes_held"]) == (
        2,
        1,
    )
    prefill = result["steps"][0]
    assert (prefill["prefetches"], prefill["replayed"]) == (0, 0)
    assert [step["replayed"] for step in decode(result)] == [A_STEP] * len(decode(result))
