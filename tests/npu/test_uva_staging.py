"""uva-staging in the real vllm-ascend, over the simulated device with late delivery."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from npu.conftest import Simulate, read_result
from npu.test_tokens import FULL_GRAPH

from ascend_opt.simnpu.installation import Installation
from ascend_opt.tiny import write_tiny_model

PROGRAM = Path(__file__).with_name("staging_program.py")
BOTH = "sync-elision+uva-staging"
# The cache holds 8 usable blocks; the workload wants more, so requests are preempted.
FEW_BLOCKS = {"num_gpu_blocks_override": 9}
ENVIRON = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ASCEND_OPT": "",
}
DECODE = slice(-8, -4)  # the last steps but those in which requests end: one token each


@pytest.fixture(scope="module")
def blocks(installation: Installation) -> bool:
    """Whether the installed release blocks on each copy."""
    return installation.release.name == "0.26.0rc1"


@pytest.fixture(
    scope="module",
    params=["eager", pytest.param("full-graph", marks=pytest.mark.extended)],
)
def phases(
    request: pytest.FixtureRequest, simulate: Simulate, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One engine, the same requests unpatched, patched, with both passes, and unpatched again."""
    model = write_tiny_model(tmp_path_factory.mktemp("one_layer"), layers=1)
    keywords = FEW_BLOCKS | (FULL_GRAPH if request.param == "full-graph" else {})
    which = f"off,uva-staging,{BOTH},off"
    return read_result(simulate(PROGRAM, str(model), which, json.dumps(keywords), environ=ENVIRON))


def test_the_workload_is_hard_enough(phases: dict[str, Any]) -> None:
    """Two steps in flight, requests preempted, and rows freed in an order that repeats."""
    assert phases["runner"] == "vllm_ascend.worker.v2.model_runner.NPUModelRunner"
    assert phases["async_scheduling"]
    assert phases["steps_in_flight"] == 2
    assert phases["off"]["preempted"]


@pytest.mark.parametrize("phase", ["uva-staging", BOTH])
def test_tokens_and_tables_are_the_same_after_every_step(
    phases: dict[str, Any], phase: str
) -> None:
    """Chunks, batch changes and preemption included, every table is bit-equal on the device."""
    assert phases[phase]["tokens"] == phases["off"]["tokens"]
    assert phases[phase]["digests"] == phases["off"]["digests"]
    assert phases[phase]["wrong"] == phases["off"]["wrong"] == 0


def test_a_decode_step_has_no_blocking_copy(phases: dict[str, Any], blocks: bool) -> None:
    """15 blocking copies become 0, 32 stream synchronisations 2: those that fetch the tokens."""
    off, on = (phases[p]["steps"][DECODE] for p in ("off", "uva-staging"))
    if blocks:
        assert {s["calls"]["memcpy_sync"] for s in off} == {15}
        assert {s["calls"]["sync_stream"] for s in off} == {32}
    assert not any("memcpy_sync" in step["calls"] for step in on)
    assert {step["calls"]["sync_stream"] for step in on} == {2}


def test_both_passes_wait_for_nothing_but_the_tokens(phases: dict[str, Any]) -> None:
    """Two stream synchronisations and one event wait, all of `async_utils.py`, in a decode step."""
    for step in phases[BOTH]["steps"][DECODE]:
        calls = step["calls"]
        waits = {k: n for k, n in calls.items() if k.startswith("sync_") or k == "memcpy_sync"}
        assert waits == {"sync_stream": 2, "sync_event": 1}


def test_it_says_what_it_did_and_added_no_wait(phases: dict[str, Any]) -> None:
    """Every write was handled, most changed nothing, and no event had to be waited for."""
    status = phases["uva-staging"]["states"]["uva-staging"]
    assert status["state"] == "active"
    counters = status["counters"]
    assert counters["held"] == counters["steps"] > 0
    assert counters["held"] == counters["copies"] + counters["unchanged"]
    assert counters["unchanged"] > counters["copies"] > 0
    assert "waits" not in counters


def test_disabled_it_leaves_the_driver_calls_as_they_were(phases: dict[str, Any]) -> None:
    """After `disable`, every step makes the unpatched calls again; tokens stay."""

    def calls(step: dict[str, Any]) -> Counter[str]:
        return Counter({k: n for k, n in step["calls"].items() if k != "query_event"})

    before, after = phases["off"], phases["off-3"]
    assert after["tokens"] == before["tokens"]
    assert list(map(calls, after["steps"]))[1:] == list(map(calls, before["steps"]))[1:]


@pytest.mark.parametrize("how", ["on", "switched"])
def test_random_writes_reach_the_device_as_upstream_brings_them(
    phases: dict[str, Any], how: str
) -> None:
    """First rows, single rows, slices, masks; also while the pass goes on and off in between."""
    assert phases["writes"][how] == phases["writes"]["off"]


def test_no_source_is_overwritten_before_it_was_read(phases: dict[str, Any]) -> None:
    """Six writes to two buffers in one go come out right, by waiting; unguarded, they do not."""
    assert phases["overwritten"]["guarded"] == 0
    assert phases["overwriting"]["counters"]["waits"] == 4
    assert phases["overwritten"]["unguarded"] > 0
