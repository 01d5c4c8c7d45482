"""Faults in a running real vllm-ascend over the simulated device, each with its end."""

from pathlib import Path
from typing import Any

import pytest
from npu.conftest import Simulate, read_result

from ascend_opt.simnpu.installation import Installation

pytestmark = pytest.mark.extended  # one engine, a minute and more

PROGRAM = Path(__file__).with_name("faults_program.py")
UPDATE = "vllm_ascend.worker.v2.model_runner:NPUModelRunner._update_seq_lens_cpu"
NO_OPERATOR = "AttributeError: '_OpNamespace' 'npu' object has no attribute 'npu_prefetch'"


@pytest.fixture(scope="module")
def ends(simulate: Simulate, tiny_model: Path) -> dict[str, Any]:
    """How each fault ended; the first meets the engine while it captures its graphs."""
    environ = {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ASCEND_OPT": "",
        "OMP_NUM_THREADS": "1",
    }
    return read_result(simulate(PROGRAM, str(tiny_model), environ=environ))


def test_the_workload_can_tell(ends: dict[str, Any]) -> None:
    """Each prompt has tokens of its own, over all the steps that faults are injected into."""
    assert [len(tokens) for tokens in ends["tokens"].values()] == [110] * 3
    assert len({tuple(tokens) for tokens in ends["tokens"].values()}) == 3


def test_a_torch_npu_without_npu_prefetch_costs_the_pass_not_the_capture(
    ends: dict[str, Any],
) -> None:
    """It fails inside a capture, which ends joined: the engine starts, and every token is right."""
    end = ends["capture"]
    assert (end["state"], end["reason"]) == ("failed", f"prefetch: {NO_OPERATOR}")
    assert end["counters"].get("prefetches", 0) == 0
    assert end["equal"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no side stream", "RuntimeError: no stream is left"),
        ("no npu_prefetch", NO_OPERATOR),
    ],
)
def test_what_a_prefetch_needs_and_does_not_find_costs_the_pass(
    ends: dict[str, Any], fault: str, reason: str
) -> None:
    """Outside a capture: off in the same forward pass, with the reason; tokens are right."""
    end = ends[fault]
    assert (end["state"], end["reason"]) == ("failed", f"prefetch: {reason}")
    assert not end["patched"]
    assert end["equal"] == [True, True]


@pytest.mark.parametrize("at", [1, 100])
def test_sync_elision_that_fails_hands_over_to_upstream_in_that_step(
    ends: dict[str, Any], installation: Installation, at: int
) -> None:
    """Upstream's own method takes the step again; the copy that it waits for was made first."""
    end = ends[f"fill at {at}"]
    assert (end["state"], end["reason"]) == (
        "failed",
        f"{UPDATE}: RuntimeError: the buffers are gone",
    )
    assert end["counters"]["steps"] == at
    if installation.release.name == "0.26.0rc1":
        assert end["counters"].get("waits_elided", 0) == at - 1
    assert not end["patched"]
    assert end["equal"] == [True, True]
