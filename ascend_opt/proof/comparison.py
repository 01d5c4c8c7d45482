"""Comparing what two runs generated: the first difference, and how far logprobs are apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ascend_opt.proof.engine_run import Outcome

LOGPROBS = 5
"""Candidates whose logprobs are asked for at each position."""

TOLERANCE = 1e-3
"""Default difference of logprobs (nats) that counts as none."""


@dataclass(frozen=True)
class Side:
    """One run's choice at a position.

    Attributes:
        token: Token id, or None where the run had no token there.
        text: The token as text, where known.
        logprob: Its logprob in this run (nats), or None if unknown or not finite.
        other_logprob: The logprob that this run gave to the other run's token; None if that was
            not among its `LOGPROBS` most likely.
    """

    token: int | None
    text: str | None
    logprob: float | None
    other_logprob: float | None

    def __str__(self) -> str:
        if self.token is None:
            return "no token"
        text = "" if self.text is None else f"{self.text!r} "
        other = (
            f"not among its first {LOGPROBS}"
            if self.other_logprob is None
            else f"{self.other_logprob:.4f}"
        )
        own = "unknown" if self.logprob is None else f"{self.logprob:.4f}"
        return f"{text}(id {self.token}, logprob {own}; the other token: {other})"


@dataclass(frozen=True)
class Difference:
    """The first position at which two runs differ on one prompt.

    Attributes:
        prompt: Index of the prompt, from 0.
        position: Index of the generated token, from 0.
        expected: The first run's side.
        found: The second run's side.
        tokens_differ: False where the tokens are the same and only their logprobs are apart.
    """

    prompt: int
    position: int
    expected: Side
    found: Side
    tokens_differ: bool

    def __str__(self) -> str:
        what = "" if self.tokens_differ else ", same token, logprobs apart"
        return (
            f"prompt {self.prompt + 1}, token {self.position + 1}{what}: "
            f"unpatched {self.expected}, patched {self.found}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Comparison:
    """How one run compares with another.

    Attributes:
        differences: The first difference of each prompt that has one, in order of prompts; where
            tokens differ, that, else the first logprob out of tolerance.
        tokens: Tokens that were compared.
        tokens_equal: Of these, how many are equal (all after a difference count as different).
        max_logprob_difference: Largest finite difference of a chosen token's logprob (nats), over
            positions before the first token that differs; None without logprobs.
    """

    differences: tuple[Difference, ...]
    tokens: int
    tokens_equal: int
    max_logprob_difference: float | None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def prompts(self) -> set[int]:
        """Return the prompts that differ."""
        return {difference.prompt for difference in self.differences}

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"equal": self.equal, **dataclasses.asdict(self)}


def compare(expected: Outcome, found: Outcome, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two runs of the same prompts.

    Args:
        expected: The run to go by.
        found: The other.
        tolerance: Difference of logprobs (nats) that counts as none.
    """
    differences: list[Difference] = []
    total = equal = 0
    largest: float | None = None
    for prompt, (ours, theirs) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
        here = _logprobs(expected, prompt), _logprobs(found, prompt)
        length = max(len(ours), len(theirs))
        same = _common(ours, theirs)
        apart = _apart(*here, same)
        total += length
        equal += same
        known = [distance for distance in apart if math.isfinite(distance)]
        if known:
            largest = max(largest or 0.0, *known)
        if same < length:
            position, differ = same, True
        else:
            over = [index for index, distance in enumerate(apart) if not distance <= tolerance]
            if not over:
                continue
            position, differ = over[0], False
        sides = (
            _side(ours, here[0], theirs, position),
            _side(theirs, here[1], ours, position),
        )
        differences.append(Difference(prompt, position, *sides, differ))
    return Comparison(tuple(differences), total, equal, largest)


def _logprobs(outcome: Outcome, prompt: int) -> Sequence[Sequence[Sequence[Any]]]:
    return outcome.logprobs[prompt] if outcome.logprobs else []


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return min(len(ours), len(theirs))


def _apart(ours: Any, theirs: Any, length: int) -> list[float]:
    """Return the difference of the chosen token's logprob at each of the first positions.

    NaN, which a broken kernel gives, stays NaN: no tolerance accepts it. The chosen token is the
    same on both sides and comes first.
    """
    found = []
    for a, b in zip(ours[:length], theirs[:length], strict=False):
        found.append(0.0 if a[0][1] == b[0][1] else abs(a[0][1] - b[0][1]))
    return found


def _side(
    tokens: Sequence[int],
    logprobs: Sequence[Sequence[Sequence[Any]]],
    others: Sequence[int],
    position: int,
) -> Side:
    if position >= len(tokens):
        return Side(None, None, None, None)
    candidates = {row[0]: row for row in logprobs[position]} if position < len(logprobs) else {}
    chosen = candidates.get(tokens[position])
    other = candidates.get(others[position]) if position < len(others) else None
    return Side(
        token=tokens[position],
        text=chosen[2] if chosen else None,
        logprob=_finite(chosen[1]) if chosen else None,
        other_logprob=_finite(other[1]) if other else None,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
