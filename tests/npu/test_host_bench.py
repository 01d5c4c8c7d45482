"""bench --host in the real vllm-ascend: a few steps give figures that hang together."""

import statistics

import pytest

from ascend_opt import registry
from ascend_opt.controller import make_request
from ascend_opt.proof.bench import Candidate
from ascend_opt.proof.host.bench import HostBenchmark, HostPlan, host_bench
from ascend_opt.proof.workspace import Progress, Workspace
from ascend_opt.simnpu.installation import Installation

UPDATE = "vllm_ascend.worker.v2.model_runner:NPUModelRunner._update_seq_lens_cpu"


@pytest.fixture(scope="module")
def found(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> HostBenchmark:
    """One engine with the shapes of the tiny model, 64 requests, and a profile."""
    if installation.release.name != "0.26.0rc1":
        pytest.skip("one release is enough: the one in which the pass changes driver calls")
    plan = HostPlan("tiny", (2, 64), (64,), "eager", rounds=8, profile=True)
    made = make_request(registry.discover().get("sync-elision"), {})
    workspace = Workspace(str(tmp_path_factory.mktemp("host")), "bench")
    tried = [Candidate("sync-elision", {"sync-elision": made})]
    return host_bench(plan, tried, workspace, Progress("bench", live=False))


def test_a_pass_that_saves_time_is_seen_to(found: HostBenchmark) -> None:
    """The method that it patches takes less, beyond doubt, and it was on in every turn."""
    few, many = found.cells
    assert many.compared()[UPDATE].high < 0.5
    assert len(many.off["step"]) == len(many.on["step"]) == 8
    assert 0 < many.shares(UPDATE)[1] < many.shares(UPDATE)[0] < 1
    assert statistics.median(few.off[UPDATE]) < statistics.median(many.off[UPDATE])
    (activity,) = found.benchmark.activity["sync-elision"]
    assert activity.problem is None
    assert activity.counters["rows_kept"] > 0


def test_driver_calls_change_by_what_the_pass_elides(
    found: HostBenchmark,
) -> None:
    """One event wait and one copy fewer, and what goes with them; nothing else changes."""
    for cell in found.cells:
        changed = {k: v for k, v in cell.changed_calls().items() if k != "query_event"}
        assert {kind: off - on for kind, (off, on) in changed.items()} == {
            "memcpy_async_d2h": 1,
            "record_event": 2,
            "stream_wait_event": 1,
            "sync_event": 1,
        }


def test_the_profile_names_what_grows(found: HostBenchmark) -> None:
    """Files of the real packages, what grows first; the method that was patched is not among it."""
    (profile,) = found.profiles
    assert profile.costs
    assert [cost.grows for cost in profile.costs] == sorted(
        (cost.grows for cost in profile.costs), reverse=True
    )
    assert any(cost.place.startswith(("vllm/", "vllm_ascend/")) for cost in profile.costs)
    assert "_update_seq_lens_cpu" not in {cost.function for cost in profile.costs}


def test_memory_is_that_of_a_process_without_weights(found: HostBenchmark) -> None:
    """Device memory is not the host's."""
    assert 0.1 < found.peak_gib < 4
