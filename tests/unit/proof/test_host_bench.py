"""bench --host but for its engine, which tests/npu runs."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ascend_opt import registry
from ascend_opt.cli import main
from ascend_opt.config import Request
from ascend_opt.controller import make_request
from ascend_opt.proof.bench import OFF, ON, Candidate
from ascend_opt.proof.host.bench import (
    HostBenchError,
    HostCell,
    HostLoad,
    HostPlan,
    host_bench,
    together,
)
from ascend_opt.proof.host.engine import steps_of
from ascend_opt.proof.workspace import Progress, Workspace

METHOD = "m.n:Runner.prepare"


def request(name: str) -> Request:
    return make_request(registry.discover().get(name), {})


def cell(load: HostLoad, pairs: int = 8) -> HostCell:
    made = HostCell("p", load)
    for number in range(pairs):
        noise = number / 100
        made.add(OFF, {"step": 10 + noise, METHOD: 2 + noise})
        made.add(ON, {"step": 8 + noise, METHOD: 0.5 + noise})
        made.add_calls(OFF, {"memcpy_sync": 15, "sync_stream": 32, "kernel": 76})
        made.add_calls(ON, {"memcpy_sync": 0, "sync_stream": 2, "kernel": 76})
    return made


def test_a_cell_has_milliseconds_and_shares_of_the_step() -> None:
    """Saved is the median of the pairs' differences; a method's share is of its own arm's step."""
    found = cell(HostLoad(8, 256, "eager"))
    assert found.saved_ms("step") == pytest.approx(2.0)
    assert found.shares(METHOD) == pytest.approx((0.2, 0.0667), abs=3e-3)
    assert found.compared()["step"].differs


def test_driver_calls_that_change_are_shown_and_others_are_not() -> None:
    """Counts are medians over the timed steps."""
    found = cell(HostLoad(8, 256, "eager")).changed_calls()
    assert found == {"memcpy_sync": (15, 0), "sync_stream": (32, 2)}


def test_each_pass_is_a_candidate_and_all_of_them_are_one() -> None:
    """One pass is one candidate, not two of the same."""
    one = Candidate("a", {"a": request("sync-elision")})
    assert together(one) == [one]
    both = Candidate("a, b", {"a": request("sync-elision"), "b": request("mlp-prefetch")})
    assert [c.label for c in together(both)] == ["a", "b", "a, b"]


def plan(**changes: Any) -> HostPlan:
    given = {
        "shapes": "tiny",
        "num_requests": (1, 64),
        "max_num_seqs": (32, 64),
        "mode": "eager",
        "rounds": 6,
    }
    return HostPlan(**{**given, **changes})


def words(arguments: list[str]) -> dict[str, str]:
    return dict(itertools.pairwise(arguments))


def test_an_engine_has_room_for_every_step_of_every_request() -> None:
    """Length and blocks of the cache follow from the steps; requests beyond the room are left."""
    tokens = steps_of(40, 4)
    found = words(plan().engine_arguments(64, tokens))
    assert int(found["--max-model-len"]) >= tokens + 32
    assert int(found["--num-gpu-blocks-override"]) * 128 >= 64 * int(found["--max-model-len"])
    assert [load.num_requests for load in plan().loads(32)] == [1]


def test_graphs_are_captured_for_the_batches_that_are_measured() -> None:
    """No other size is, and eager mode captures none."""
    graphs = json.loads(words(plan(mode="graph").engine_arguments(64, 9))["--compilation-config"])
    assert graphs["cudagraph_capture_sizes"] == [1, 64]
    assert "--enforce-eager" not in plan(mode="graph").engine_arguments(64, 9)
    assert "--enforce-eager" in plan().engine_arguments(64, 9)


def test_a_pass_in_the_model_s_graph_is_refused(tmp_path: Path) -> None:
    """What is captured cannot be swapped between steps: bench without --host measures it."""
    tried = [Candidate("mlp-prefetch", {"mlp-prefetch": request("mlp-prefetch")})]
    with pytest.raises(HostBenchError, match="mlp-prefetch changes the model's graph"):
        host_bench(plan(), tried, Workspace(str(tmp_path), "bench"), Progress("bench", False))


def test_where_there_is_no_vllm_ascend_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No supported set of packages, no engine: the error lists what is missing."""
    from ascend_opt.simnpu import releases

    nothing = dict.fromkeys(releases.installed_versions())
    monkeypatch.setattr(releases, "installed_versions", lambda: nothing)
    tried = [Candidate("sync-elision", {"sync-elision": request("sync-elision")})]
    with pytest.raises(HostBenchError, match="over the simulated driver: "):
        host_bench(plan(), tried, Workspace(str(tmp_path), "bench"), Progress("bench", False))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "tiny"], "give --shapes, not --model"),
        (["--python", "other"], "leave --python out"),
        (["--num-requests", "0"], "--num-requests 0: expected whole numbers"),
        (["--max-num-seqs", "x"], "--max-num-seqs x: expected whole numbers"),
    ],
)
def test_options_that_do_not_go_together(given: list[str], message: str) -> None:
    """Refused before anything is started."""
    done = CliRunner().invoke(main, ["bench", "--host", "--enable", "sync-elision", *given])
    assert done.exit_code == 2
    assert message in done.stderr


def test_without_host_a_model_is_wanted() -> None:
    """The other benchmark runs one."""
    done = CliRunner().invoke(
        main, ["bench", "--python", "other", "--enable", "sync-elision", "--rounds", "6"]
    )
    assert done.exit_code == 2
    assert "Missing option '--model'" in done.stderr
