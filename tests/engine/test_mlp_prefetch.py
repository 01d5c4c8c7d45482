"""mlp-prefetch in a real vLLM on the CPU, with the backend that only counts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compat import table

from ascend_opt.conditions import installed_version
from ascend_opt.tiny import HIDDEN, INTERMEDIATE, write_tiny_model

LAYERS = 4
A_STEP = 2 * LAYERS
BYTES_A_STEP = LAYERS * 3 * INTERMEDIATE * HIDDEN * 2  # gate, up and down in bfloat16
RECORD = {"backend": "record"}
DOWN_ONLY = {"backend": "record", "gate_up_bytes": 0, "down_bytes": "1kB"}
MODES = ["eager", "platform", "vllm-compile"]


def text(length: int) -> list[int]:
    return [32 + (7 * i + i * i) % 95 for i in range(length)]


DECODE = {"prompts": [text(5), text(11), text(23)], "max_tokens": 12}
# One request each, so that its first step has exactly as many tokens as its prompt.
PREFILLS = [{"prompts": [text(length)], "max_tokens": 2} for length in (499, 500, 600, 499)]

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run an engine in a process of its own, once for equal arguments."""
    directory = tmp_path_factory.mktemp("engine")
    models = {
        family: write_tiny_model(directory / family, family=family, layers=LAYERS)
        for family in ("qwen2", "qwen3")
    }
    answers: dict[str, dict[str, Any]] = {}

    def once(
        mode: str,
        parameters: dict[str, Any] | None,
        family: str = "qwen3",
        aot: str = "1",
        turn: int = 1,
    ) -> dict[str, Any]:
        key = json.dumps([mode, parameters, family, aot, turn])
        if key not in answers:
            job = {
                "mode": mode,
                "parameters": parameters,
                "model": str(models[family]),
                "runs": [DECODE, *PREFILLS],
            }
            environment = {"VLLM_USE_AOT_COMPILE": aot}
            answers[key] = in_process(job, directory, f"cache-{mode}-{aot}", environment)
        return answers[key]

    return once


def in_process(
    job: dict[str, Any], directory: Path, cache: str, environment: dict[str, str]
) -> dict[str, Any]:
    request, answer = directory / "job.json", directory / "answer.json"
    request.write_text(json.dumps(job))
    answer.unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("prefetch_engine.py"), request, answer],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(directory / cache),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-5000:]
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_decode_step_prefetches_each_weight_once(mode: str, run: Run) -> None:
    """2 x layers prefetches, of all bytes of the MLPs, in the prefill and every decode step."""
    answer = run(mode, RECORD)
    _, steps = answer["runs"][0]
    assert answer["state"] == "active"
    assert (
        steps
        == [
            {
                "calls": A_STEP,
                "steps": 1,
                "held": 1,
                "prefetches": A_STEP,
                "bytes_prefetched": BYTES_A_STEP,
            }
        ]
        * DECODE["max_tokens"]
    )


def test_the_counts_are_those_of_the_compatibility_table(run: Run) -> None:
    """docs/compatibility.md says of the installed vLLM what its engine does in a decode step."""
    promised = table.read()["engine"][installed_version("vllm")]
    _, steps = run("eager", RECORD)["runs"][0]
    assert steps[-1]["prefetches"] == promised["prefetches_a_step"]
    assert steps[-1]["bytes_prefetched"] == promised["bytes_a_step"]


@pytest.mark.parametrize("mode", MODES)
def test_the_limit_is_asked_of_every_batch(mode: str, run: Run) -> None:
    """None at 500 tokens and above, all at 499, before and after; decode goes on prefetching."""
    answer = run(mode, RECORD)
    steps = [[step.get("prefetches", 0) for step in steps] for _, steps in answer["runs"][1:]]
    assert steps == [[A_STEP, A_STEP], [0, A_STEP], [0, A_STEP], [A_STEP, A_STEP]]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_unpatched_engine(mode: str, run: Run) -> None:
    """Every greedy token is the same, and they are not all one."""
    unpatched, patched = run(mode, None), run(mode, RECORD)
    tokens = [tokens for tokens, _ in unpatched["runs"]]
    assert [tokens for tokens, _ in patched["runs"]] == tokens
    assert len({token for request in tokens[0] for token in request}) > 10


@pytest.mark.parametrize("mode", ["platform", "vllm-compile"])
def test_off_leaves_no_op_in_the_graph(mode: str, run: Run) -> None:
    """The compiled graph holds 2 x layers calls of the op when on, and none when off."""
    off, on = run(mode, None), run(mode, RECORD)
    assert off["state"] == "off"
    assert off["graphs"] == [0] * len(off["graphs"]) != []
    assert sum(on["graphs"]) == A_STEP


@pytest.mark.parametrize("mode", MODES)
def test_disabling_and_enabling_again_reach_a_built_model(mode: str, run: Run) -> None:
    """Disabled, the built model prefetches nothing; enabled again it does; tokens stay."""
    answer = run(mode, RECORD)
    tokens = answer["runs"][0][0]
    assert answer["off"] == [tokens, [{}] * DECODE["max_tokens"]]
    assert answer["on"][0] == tokens
    assert [step["prefetches"] for step in answer["on"][1]] == [A_STEP] * DECODE["max_tokens"]


@pytest.mark.parametrize("mode", ["platform", "vllm-compile"])
def test_warm_up_runs_pass_the_op(mode: str, run: Run) -> None:
    """The engine's own warm-up of 1024 tokens goes through the op, and prefetches nothing."""
    start = run(mode, RECORD)["start"]
    assert start["calls"] == start["too_many_tokens"] == A_STEP * start["steps"] > 0
    assert "prefetches" not in start


def test_qwen2_is_served_by_the_same_pass(run: Run) -> None:
    """A Qwen2 model: the same counts a step, and the tokens of the unpatched run."""
    unpatched, patched = run("eager", None, "qwen2"), run("eager", RECORD, "qwen2")
    tokens, steps = patched["runs"][0]
    assert tokens == unpatched["runs"][0][0]
    assert [step["prefetches"] for step in steps] == [A_STEP] * DECODE["max_tokens"]


def test_graph_only_is_refused_where_nothing_is_captured(run: Run) -> None:
    """On an engine without graphs, where=graph is inapplicable, says why, and leaves no op."""
    answer = run("eager", {"backend": "record", "where": "graph"})
    assert answer["state"] == "inapplicable"
    assert "captures no graph" in answer["reason"]
    assert answer["runs"][0][0] == run("eager", None)["runs"][0][0]
    assert answer["start"] == {}


@pytest.mark.parametrize(
    ("aot", "runs"),
    [
        ("1", [(None, 1), (RECORD, 1), (DOWN_ONLY, 1), (None, 2), (RECORD, 2)]),
        pytest.param("0", [(None, 1), (RECORD, 1), (None, 2)], marks=pytest.mark.extended),
    ],
    ids=["aot", "no-aot"],
)
def test_the_compile_cache_tells_runs_apart(
    aot: str, runs: list[tuple[dict[str, Any] | None, int]], run: Run
) -> None:
    """One cache directory: off, on and other parameters never share an artifact, equal runs do.

    Equal runs are compared with AOT compile only: without it an unpatched engine, forced into
    VLLM_COMPILE on a CPU, compiles again as well.
    """
    tokens = run("vllm-compile", None)["runs"][0][0]
    for parameters, turn in runs:
        answer = run("vllm-compile", parameters, aot=aot, turn=turn)
        found, steps = answer["runs"][0]
        expected = BYTES_A_STEP if parameters == RECORD else LAYERS * 1000 if parameters else 0
        assert [step.get("bytes_prefetched", 0) for step in steps] == [expected] * len(steps)
        assert found == tokens
        if turn == 1 or aot == "1":
            assert (answer["compiled"]["num_backend_compilations"] > 0) == (turn == 1)
