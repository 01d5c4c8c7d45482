import json
import math

import pytest
from outcomes import outcome

from ascend_opt.proof.comparison import compare


def test_equal_runs_have_no_difference() -> None:
    """Equal tokens and equal logprobs compare as equal, and every token is counted."""
    found = compare(outcome([65, 66], [67]), outcome([65, 66], [67]))
    assert found.equal
    assert (found.tokens, found.tokens_equal, found.max_logprob_difference) == (3, 3, 0.0)


def test_the_first_difference_of_each_prompt_is_found() -> None:
    """A difference names prompt, position, both tokens and what each run thought of the other's."""
    found = compare(outcome([65], [66, 67, 68]), outcome([65], [66, 68, 70]))
    (difference,) = found.differences
    assert (difference.prompt, difference.position, difference.tokens_differ) == (1, 1, True)
    assert (difference.expected.token, difference.found.token) == (67, 68)
    assert difference.expected.other_logprob == -3.0  # 68 was its second candidate
    assert difference.found.other_logprob is None  # 67 was not among the other's
    assert (found.tokens, found.tokens_equal) == (4, 2)
    assert str(difference).startswith("prompt 2, token 2: unpatched 'C' (id 67, logprob -0.5000")


def test_a_run_that_stops_early_differs() -> None:
    """A missing token is a difference at the place where it is missing."""
    (difference,) = compare(outcome([65, 66]), outcome([65])).differences
    assert difference.position == 1
    assert difference.found.token is None
    assert "no token" in str(difference)


@pytest.mark.parametrize(("gap", "equal"), [(0.0009, True), (0.0011, False)])
def test_logprobs_are_held_to_the_tolerance(gap: float, equal: bool) -> None:
    """Equal tokens with logprobs further apart than the tolerance are not equal."""
    found = compare(outcome([65]), outcome([65], logprob=-0.5 + gap), tolerance=0.001)
    assert found.equal is equal
    assert found.max_logprob_difference == pytest.approx(gap)
    assert all(not difference.tokens_differ for difference in found.differences)


def test_nan_is_never_within_the_tolerance() -> None:
    """A kernel that gives NaN is caught, though NaN compares as neither less nor more."""
    found = compare(outcome([65]), outcome([65], logprob=math.nan), tolerance=1e9)
    assert not found.equal
    assert "NaN" not in json.dumps(found.as_dict())  # which JSON does not have


def test_a_token_difference_goes_before_an_earlier_logprob_difference() -> None:
    """Where tokens differ, that is what is reported, not the logprobs before it."""
    (difference,) = compare(outcome([65, 66]), outcome([65, 68], logprob=-0.6)).differences
    assert difference.tokens_differ
    assert difference.position == 1
