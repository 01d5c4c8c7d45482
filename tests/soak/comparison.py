"""Two servers' answers to one request: equal, a tie, or different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from soak.traffic import Answer, Request

TOLERANCE = 1e-3
"""Natural-log units within which two log probabilities are the same number.

The twins never have the same batches, and in float32 the batch decides the order of some sums, and
so the last digits. docs/testing.md gives what that was measured to be. Where the two likeliest
tokens lie within the tolerance, either is right: such a difference is a tie, and counted.
"""

Likeliest = Callable[[list[int]], dict[int, float]]
"""Gives the likeliest tokens after some tokens, with their log probabilities."""


@dataclass
class Comparison:
    """All answers so far.

    Attributes:
        requests: Pairs of answers.
        cancelled: Those of them whose connection the client closed.
        tokens: Tokens compared.
        ties: Requests whose first difference was a tie; nothing behind it was compared.
        logprobs: Tokens whose log probabilities were compared.
        drift: The largest difference of two log probabilities of the same token.
        faults: What must not be: errors, short answers, differences.
    """

    requests: int = 0
    cancelled: int = 0
    tokens: int = 0
    ties: int = 0
    logprobs: int = 0
    drift: float = 0.0
    faults: list[str] = field(default_factory=list)

    def take(
        self, request: Request, unpatched: Answer, patched: Answer, likeliest: Likeliest
    ) -> None:
        """Compare one pair of answers.

        Args:
            request: What was asked.
            unpatched: The twin's answer.
            patched: The other's.
            likeliest: Asked where they differ whether that is a tie.
        """
        self.requests += 1
        self.cancelled += request.cut_after is not None
        name = f"request {request.number}"
        for twin, answer in (("unpatched", unpatched), ("patched", patched)):
            fault = _incomplete(request, answer)
            if fault:
                self.faults.append(f"{name}, {twin}: {fault}")
        place = first_difference(unpatched.tokens, patched.tokens)
        both = min(len(unpatched.tokens), len(patched.tokens))
        agreed = both if place is None else place
        self.tokens += agreed
        self._take_logprobs(name, unpatched, patched, agreed)
        if place is None:
            return
        found = unpatched.tokens[place], patched.tokens[place]
        top = likeliest(request.prompt + unpatched.tokens[:place])
        if is_tie(found, top):
            self.ties += 1
        else:
            self.faults.append(f"{name} differs at token {place}: {found[0]}, patched {found[1]}")

    def _take_logprobs(self, name: str, unpatched: Answer, patched: Answer, agreed: int) -> None:
        pairs = list(zip(unpatched.logprobs[:agreed], patched.logprobs[:agreed], strict=False))
        self.logprobs += len(pairs)
        worst = max(
            (abs(one[t] - other[t]) for one, other in pairs for t in one.keys() & other.keys()),
            default=0.0,
        )
        self.drift = max(self.drift, worst)
        if worst > TOLERANCE:
            self.faults.append(f"{name}: log probabilities differ by {worst:.2g}")


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Return the first place at which both have a token and not the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), None)


def is_tie(found: tuple[int, int], top: dict[int, float]) -> bool:
    """Return whether both tokens are among the likeliest, and within the tolerance."""
    if not set(found) <= top.keys():
        return False
    return abs(top[found[0]] - top[found[1]]) <= TOLERANCE


def _incomplete(request: Request, answer: Answer) -> str:
    if answer.error:
        return answer.error
    if request.cut_after is not None:
        return "" if len(answer.tokens) >= request.cut_after else "ended before its cut"
    if len(answer.tokens) != request.max_tokens or answer.finish_reason != "length":
        found = f"{len(answer.tokens)} of {request.max_tokens} tokens"
        return f"{found}, finish reason {answer.finish_reason}"
    return ""
