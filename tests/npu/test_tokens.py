"""Real vLLM and vllm-ascend on the simulated device compute what stock CPU vLLM computes."""

import json
from pathlib import Path
from typing import Any

import pytest
from npu import engine_program
from npu.conftest import Simulate, read_result

from ascend_opt.simnpu import launch

# The cache holds 11 usable blocks; the workload wants up to 16.
FEW_BLOCKS = {"num_gpu_blocks_override": 12}
FULL_GRAPH = {
    "enforce_eager": False,
    "compilation_config": {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
DEFAULT_MODE = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
}
MODES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "v2-eager": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "v2-full-graph": (FULL_GRAPH, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "v2-default": (DEFAULT_MODE, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "v1-eager": ({}, {}),
    "v1-full-graph": (FULL_GRAPH, {}),
    "v1-default": (DEFAULT_MODE, {}),
}


# One engine takes a minute or two. The checks run a mode of either runner on each set; `-m ""` runs
# all. An engine in a process of its own is in them too: test_serve.py asks one for tokens.
EXTENDED = ("v2-eager", "v2-default", "v1-full-graph", "v1-default")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(mode, marks=[pytest.mark.extended] if mode in EXTENDED else [])
        for mode in MODES
    ],
)
def engine(
    request: pytest.FixtureRequest, simulate: Simulate, tiny_model: Path
) -> tuple[str, dict[str, Any]]:
    """One engine run in each mode, shared by every test below."""
    return request.param, run(simulate, tiny_model, request.param)


def run(
    simulate: Simulate, model: Path, mode: str, compute: launch.Compute = "full"
) -> dict[str, Any]:
    keywords, environ = MODES[mode]
    done = simulate(
        Path(engine_program.__file__),
        str(model),
        json.dumps({**FEW_BLOCKS, **keywords}),
        environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environ},
        compute=compute,
    )
    return read_result(done)


def test_greedy_tokens_equal_stock_vllm(
    engine: tuple[str, dict[str, Any]], expected: dict[str, list[int]]
) -> None:
    """All 8 prompts give the same 32 fp32 greedy tokens as stock CPU vLLM, with late delivery."""
    _, result = engine
    assert result["tokens"] == expected


def test_the_workload_preempts(engine: tuple[str, dict[str, Any]]) -> None:
    """At least one request was preempted and resumed, or the run above proved too little."""
    _, result = engine
    assert result["preempted"]


def test_no_placeholder_while_the_model_runs(engine: tuple[str, dict[str, Any]]) -> None:
    """No operator without a kernel gave zeros to the running model; in eager mode none ever did."""
    mode, result = engine
    assert result["placeholders_after"] == result["placeholders_before"]
    if mode.endswith("eager"):
        assert result["placeholders_before"] == {}


def test_decode_replays_graphs_where_there_are_graphs(engine: tuple[str, dict[str, Any]]) -> None:
    """In graph modes decode steps replay captured kernels; in eager mode nothing is replayed."""
    mode, result = engine
    replays = [step for step in result["steps"] if step["calls"].get("graph_replay")]
    if mode.endswith("eager"):
        assert not replays
    else:
        assert len(replays) > 10
        assert all(step["replayed"] > 10 for step in replays)


def test_sampling_with_a_seed_repeats(engine: tuple[str, dict[str, Any]]) -> None:
    """Temperature, top-k and top-p run; the same seed gives the same tokens."""
    _, result = engine
    first, second = result["sampled"]
    assert len(first) == 16
    assert first == second


def test_without_compute_every_step_makes_the_same_driver_calls(
    engine: tuple[str, dict[str, Any]], simulate: Simulate, tiny_model: Path
) -> None:
    """Chunks, growing and shrinking batches and preemption included; only tokens are not true."""
    mode, full = engine
    if mode == "v1-eager":
        pytest.skip("one mode is enough for every run; -m '' runs the others")
    none = run(simulate, tiny_model, mode, compute="none")
    for result in (full, none):
        for step in result["steps"]:
            step["calls"].pop("query_event", None)  # how often the allocator polls is timing
    assert none["steps"] == full["steps"]
    # A request's name ends with a random part.
    preempted = [[r.partition("-")[0] for r in x["preempted"]] for x in (none, full)]
    assert preempted[0] == preempted[1]
    assert {token for tokens in none["tokens"].values() for token in tokens} == {0}


@pytest.mark.extended
def test_engine_in_a_process_of_its_own(
    simulate: Simulate, tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    """The normal multi-process engine finds the simulated device too."""
    done = simulate(
        Path(engine_program.__file__),
        str(tiny_model),
        json.dumps(FEW_BLOCKS),
        environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"},
    )
    assert read_result(done)["tokens"] == expected
