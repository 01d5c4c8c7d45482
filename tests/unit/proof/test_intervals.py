import random

import pytest

from ascend_opt.proof.intervals import least_rounds, paired, sentence


def rounds(scale: float, noise: float, count: int, seed: int = 0) -> list[float]:
    source = random.Random(seed)
    return [scale * source.lognormvariate(0, noise) for _ in range(count)]


def test_a_clear_difference_is_seen_and_sized() -> None:
    """Half the time, in noise of 2%: the interval holds the truth and excludes equality."""
    found = paired(rounds(10, 0.02, 20), rounds(5, 0.02, 20, seed=1))
    assert found.low < 0.5 < found.high or found.ratio == pytest.approx(0.5, rel=0.02)
    assert found.differs
    assert sentence("TPOT", found).startswith("TPOT: lower with the passes, better by")


def test_equal_arms_are_mostly_not_told_apart() -> None:
    """Of 200 comparisons of equal arms, about 5% may claim a difference, not 10%."""
    claimed = sum(
        paired(rounds(10, 0.1, 12, seed=n), rounds(10, 0.1, 12, seed=1000 + n)).differs
        for n in range(200)
    )
    assert claimed <= 20


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """A true ratio of 0.9 lies in at least 90% of the intervals that promise 95%."""
    covered = 0
    for n in range(200):
        found = paired(rounds(10, 0.1, 12, seed=n), rounds(9, 0.1, 12, seed=1000 + n))
        covered += found.low <= 0.9 <= found.high
    assert covered >= 180


def test_pairing_takes_out_what_both_arms_share() -> None:
    """A machine that slows down fivefold half-way does not hide a difference of 3%."""
    drift = [1.0 + 4.0 * (n >= 10) for n in range(20)]
    off = [d * v for d, v in zip(drift, rounds(10, 0.005, 20), strict=True)]
    on = [d * v for d, v in zip(drift, rounds(9.7, 0.005, 20, seed=1), strict=True)]
    assert paired(off, on).differs


def test_no_difference_is_never_called_equal() -> None:
    """Where the interval holds 1, the sentence says that none was seen, and how large it may be."""
    found = paired(rounds(10, 0.1, 12), rounds(10, 0.1, 12, seed=1))
    text = sentence("TPOT", found)
    assert text.startswith("TPOT: no difference seen (95% interval -")
    assert "equal" not in text


@pytest.mark.parametrize(("on", "words"), [(20.0, "higher with the passes, better by 100.0%")])
def test_more_throughput_is_better(on: float, words: str) -> None:
    """Direction and verdict are told apart."""
    assert words in sentence("throughput", paired([10.0] * 6, [on] * 6), higher_is_better=True)


def test_too_few_rounds_are_refused() -> None:
    """Five pairs cannot carry 95%, six can; more confidence needs more."""
    assert (least_rounds(0.95), least_rounds(0.999)) == (6, 11)
    with pytest.raises(ValueError, match="at least 6"):
        paired([1.0] * 5, [1.0] * 5)
    with pytest.raises(ValueError, match="positive"):
        paired([1.0] * 6, [0.0] * 6)
