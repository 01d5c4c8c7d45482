import time

import pytest

from ascend_opt.proof.host.profiling import BLOCKS, Spent, compare, profile, summarised


def rows(**own_ms: float) -> list[list[object]]:
    """Rows of functions by name, 10 calls each, twice their own time in all."""
    return [
        [f"/x/site-packages/m/{name}.py", 7, name, 10.0, own, 2 * own]
        for name, own in own_ms.items()
    ]


def test_functions_in_c_are_charged_to_their_callers() -> None:
    """A caller's own time has what it spent in C, and C functions have no row."""
    caller, other, c = ("a.py", 1, "f"), ("b.py", 2, "g"), ("~", 0, "<copy>")
    stats = {
        caller: (1, 1, 0.001, 0.004, {}),
        other: (2, 2, 0.002, 0.003, {}),
        c: (3, 3, 0.005, 0.005, {caller: (1, 1, 0.003, 0.003), other: (2, 2, 0.002, 0.002)}),
    }
    assert summarised(stats) == {caller: Spent(1, 4.0, 4.0), other: Spent(2, 4.0, 3.0)}


def test_what_grows_with_the_number_of_requests_comes_first() -> None:
    """Then the rest, the dearest first in each part; what is not noticeable is left out."""
    few = rows(constant=6.0, grows=0.1, little=0.01, half=1.0)
    many = rows(constant=6.0, grows=3.0, little=0.15, half=1.9)
    found = compare("p", "load", (1, few), (101, many))
    assert [cost.function for cost in found.costs] == ["grows", "constant", "half"]
    assert [cost.grows for cost in found.costs] == [True, False, False]
    assert found.costs[0].per_request_us == pytest.approx(29.0)
    assert found.costs[0].share == pytest.approx(3.0 / 11.05)
    assert found.costs[0].place == "m/grows.py:7"
    assert (found.few_ms, found.many_ms) == pytest.approx((7.11, 11.05))


def test_what_only_a_large_batch_calls_grows() -> None:
    """A function that the small batch never called is not lost."""
    (_, new) = compare("p", "load", (1, rows(a=9.0)), (2, rows(a=9.0, new=1.0))).costs[::-1]
    assert new.function == "new"
    assert new.grows
    assert new.few == Spent(0.0, 0.0, 0.0)


def test_a_profile_is_of_one_step_and_of_the_fastest_block() -> None:
    """Calls and milliseconds are those of a step, and one disturbed block changes nothing."""
    taken = []

    def pause() -> None:
        time.sleep(0.1 if len(taken) == 3 else 0.001)

    def step() -> None:
        taken.append(1)
        pause()
        pause()

    found = {row[2]: row for row in profile(step, 2 * BLOCKS)}
    assert len(taken) == 2 * BLOCKS
    assert found["pause"][3] == 2
    assert 2.0 <= found["pause"][4] < 40.0
    assert found["step"][5] >= found["pause"][4]
