"""What paired rounds allow to be said: medians, and a ratio with a bootstrap interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95
_RESAMPLES = 9999


@dataclass(frozen=True)
class Paired:
    """One quantity, measured off and on in every round.

    Attributes:
        off: Median without the passes.
        on: Median with them.
        off_spread: Interquartile range without.
        on_spread: Interquartile range with.
        ratio: Median of the rounds' ratios, on over off.
        low: Lower end of its interval.
        high: Upper end of its interval.
        confidence: Of the interval.
        rounds: Number of pairs.
    """

    off: float
    on: float
    off_spread: float
    on_spread: float
    ratio: float
    low: float
    high: float
    confidence: float
    rounds: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes equality."""
        return not self.low <= 1.0 <= self.high

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**dataclasses.asdict(self), "differs": self.differs}


def least_rounds(confidence: float = CONFIDENCE) -> int:
    """Return how many pairs an interval needs.

    The whole range of n ratios covers their median with probability 1 - 2^(1-n), and no interval
    made from them can do better.
    """
    return math.ceil(1 - math.log2(1 - confidence) - 1e-9)


def paired(off: Sequence[float], on: Sequence[float], confidence: float = CONFIDENCE) -> Paired:
    """Compare the rounds of two arms pair by pair.

    The percentile bootstrap of the median needs no assumption on the noise, and one disturbed
    round moves neither the median nor its interval far.

    Args:
        off: One positive value for each round without the passes.
        on: The same with them, in the same order.
        confidence: Of the interval.

    Raises:
        ValueError: Too few rounds, unequal numbers, or values that are not
            positive.
    """
    import numpy as np
    from scipy.stats import bootstrap

    least = least_rounds(confidence)
    if len(off) != len(on) or len(off) < least:
        raise ValueError(
            f"{len(off)} and {len(on)} rounds, expected the same number, at least {least}"
        )
    a, b = np.asarray(off, float), np.asarray(on, float)
    if not ((a > 0).all() and (b > 0).all()):
        raise ValueError("expected positive values only")
    ratios = b / a
    if np.ptp(ratios) == 0:
        low = high = float(ratios[0])
    else:
        interval = bootstrap(
            (ratios,),
            np.median,
            n_resamples=_RESAMPLES,
            confidence_level=confidence,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    return Paired(
        off=float(np.median(a)),
        on=float(np.median(b)),
        off_spread=float(np.percentile(a, 75) - np.percentile(a, 25)),
        on_spread=float(np.percentile(b, 75) - np.percentile(b, 25)),
        ratio=float(np.median(ratios)),
        low=low,
        high=high,
        confidence=confidence,
        rounds=len(off),
    )


def sentence(what: str, found: Paired, *, higher_is_better: bool = False) -> str:
    """Return what the interval allows to be said, and no more.

    Args:
        what: The quantity.
        found: Its comparison.
        higher_is_better: Whether more of it is better.
    """
    interval = f"{found.confidence:.0%} interval {percent(found.low)} to {percent(found.high)}"
    if not found.differs:
        return f"{what}: no difference seen ({interval})"
    better = (found.low > 1) is higher_is_better
    direction = "higher" if found.low > 1 else "lower"
    verdict = "better" if better else "worse"
    return f"{what}: {direction} with the passes, {verdict} by {_size(found)} ({interval})"


def percent(ratio: float) -> str:
    """Return a ratio as a signed change, such as `-1.3%`."""
    return f"{100 * (ratio - 1):+.1f}%"


def _size(found: Paired) -> str:
    return f"{abs(100 * (found.ratio - 1)):.1f}%"
