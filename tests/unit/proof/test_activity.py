from typing import Any

import pytest
from outcomes import record

from ascend_opt.proof.activity import Activity, activities


def activity(*records: dict[str, Any], effect: str = "done") -> Activity:
    (found,) = activities(["p"], records, {"p": effect})
    return found


def test_a_pass_that_did_its_work_is_on() -> None:
    """Active in the worker with its counter above 0 is enough; elsewhere it stays armed."""
    found = activity(
        record(("p", "armed", {}), rank=None), record(("p", "active", {"steps": 3, "done": 2}))
    )
    assert found.problem is None
    assert found.states == {"armed": 1, "active": 1}
    assert found.counters == {"steps": 3, "done": 2}


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "no process"),
        ([record(("p", "armed", {}), rank=None)], "never active"),
        ([record(("p", "inapplicable", {}))], "because inapplicable"),
        ([record(("p", "builtin", {}))], "because builtin"),
        ([record(("p", "active", {}))], "never ran"),
        ([record(("p", "active", {"steps": 9}))], "never held, in 9 steps"),
        ([record(("p", "active", {"steps": 9, "held": 9}))], "did nothing"),
        (
            [record(("p", "active", {"done": 1})), record(("p", "failed", {"done": 1}), rank=1)],
            "because failed",
        ),
        (
            [record(("p", "active", {"done": 1})), record(("p", "active", {}), rank=1)],
            "rank 1",
        ),
    ],
)
def test_what_was_not_on_is_named(records: list[dict[str, Any]], words: str) -> None:
    """Each way of not having been on has its own sentence."""
    problem = activity(*records).problem
    assert problem is not None
    assert words in problem


def test_an_idle_process_that_is_no_worker_is_no_problem() -> None:
    """A process that merely imported the target counts nothing, and need not."""
    assert (
        activity(
            record(("p", "active", {}), rank=None), record(("p", "active", {"done": 1}))
        ).problem
        is None
    )


def test_a_pass_in_shadow_mode_is_on_if_it_compared() -> None:
    """Its states say so, and what it would have done does not count as done."""
    counters = {"steps": 3, "compared": 3}
    found = activity(record(("p", "active", counters), mode="shadow"), effect="compared")
    assert (found.problem, found.difference, found.mode) == (None, None, "shadow")
    assert found.states == {"active (shadow)": 1}


def test_a_difference_in_shadow_mode_is_told_from_other_failures() -> None:
    """It names the process; an error of the pass is a problem, and no difference."""
    differs = activity(
        record(("p", "failed", {"compared": 2, "differed": 1}), mode="shadow"), effect="compared"
    )
    broke = activity(record(("p", "failed", {"compared": 2}), mode="shadow"), effect="compared")
    assert differs.difference == "process 7: because failed"
    assert broke.difference is None
    assert "because failed" in (broke.problem or "")
