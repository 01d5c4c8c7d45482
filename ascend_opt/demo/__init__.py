"""`ascend_opt demo`: a tiny Qwen3 in the installed vLLM, unpatched and with the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from ascend_opt.proof.engine_run import Outcome

Table = tuple[str, Sequence[str], Iterable[Sequence[Any]]]
"""Title, headings and rows."""


class Demonstration(Protocol):
    """What a demo found."""

    @property
    def note(self) -> str:
        """What to know about it, and how to do the same on an NPU."""

    @property
    def equal(self) -> bool:
        """Whether every token is the same with the passes as without."""

    def tables(self) -> Iterator[Table]:
        """Yield what to show."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""


def demonstrate(place: str, say: Callable[[str], None]) -> Demonstration:
    """Run a demo.

    Args:
        place: `npu` (vllm-ascend on the simulated driver) or `cpu` (vLLM's CPU build).
        say: Called with a line of progress before each step.

    Raises:
        EngineRunError: An engine did not run.
    """
    from ascend_opt.demo import cpu, npu

    return npu.demonstrate(say) if place == "npu" else cpu.demonstrate(say)


def compared(off: Sequence[Sequence[int]], on: Sequence[Sequence[int]]) -> str:
    """Return how many tokens are the same at the same place, in words."""
    same = sum(a == b for x, y in zip(off, on, strict=True) for a, b in zip(x, y, strict=True))
    return f"{same} of {sum(map(len, off))}"


def states(outcome: Outcome, *first: str) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each pass in each process: `first`, then `STATE_HEADINGS`."""
    for record in outcome.records:
        for status in record["passes"]:
            yield (
                *first,
                f"{record['role']} ({record['pid']})",
                status["name"],
                status["state"],
                " ".join(f"{k}={v}" for k, v in status["counters"].items()) or "-",
                status["reason"],
            )


STATE_HEADINGS = ("process", "pass", "state", "counters", "reason")
