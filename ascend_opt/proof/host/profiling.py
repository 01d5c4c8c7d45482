"""Where the host's time goes: profiles of decode steps at two batch sizes, side by side.

What grows with the number of requests is what limits a large batch, so it comes first.
"""

from __future__ import annotations

import cProfile
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCKS = 6
NOTICEABLE = 0.02
"""Of the step: what takes less is not listed."""

Key = tuple[str, int, str]
_BUILTIN = "~"  # the file name that the profiler gives to functions in C


@dataclass(frozen=True)
class Spent:
    """What one function took in a step, on average.

    Attributes:
        calls: How often it was called.
        own_ms: In it, and in the C functions that it calls.
        total_ms: With everything that it calls.
    """

    calls: float
    own_ms: float
    total_ms: float


@dataclass(frozen=True)
class Cost:
    """One function at two batch sizes.

    Attributes:
        function: Its name.
        place: File, from the package on, and line.
        few: What it took with few requests.
        many: What it took with many.
        per_request_us: How much its own time grows with each request.
        share: Its own time with many requests, of the step's.
    """

    function: str
    place: str
    few: Spent
    many: Spent
    per_request_us: float
    share: float

    @property
    def grows(self) -> bool:
        """Whether most of what it takes with many requests is because they are many."""
        return self.many.own_ms - self.few.own_ms > self.many.own_ms / 2

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**dataclasses.asdict(self), "grows": self.grows}


@dataclass(frozen=True)
class Profile:
    """What is left of a step, function by function.

    Attributes:
        passes: Label of the candidate that was on.
        load: What the engine was under, but for the number of requests.
        few: The smaller number of requests.
        many: The larger one.
        few_ms: A profiled step with few; the profiler's own time is in it.
        many_ms: The same with many.
        costs: Functions of at least `NOTICEABLE`, those first that grow.
    """

    passes: str
    load: str
    few: int
    many: int
    few_ms: float
    many_ms: float
    costs: tuple[Cost, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "costs": [cost.as_dict() for cost in self.costs]}


def profile(step: Callable[[], object], steps: int) -> list[list[Any]]:
    """Profile some steps; return rows of file, line, name, calls, own ms and total ms a step.

    The steps are cut into blocks. Times are those of a function's fastest block, since whatever
    else the machine does only adds to them.
    """
    size = steps // BLOCKS
    blocks = []
    for _ in range(BLOCKS):
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(size):
            step()
        profiler.disable()
        profiler.create_stats()
        blocks.append(summarised(profiler.stats))
    return [
        [
            *key,
            statistics.median(block[key].calls for block in blocks) / size,
            min(block[key].own_ms for block in blocks) / size,
            min(block[key].total_ms for block in blocks) / size,
        ]
        for key in blocks[0]
        if all(key in block for block in blocks)
    ]


def summarised(stats: Mapping[Key, Sequence[Any]]) -> dict[Key, Spent]:
    """Return a profiler's raw statistics with C functions charged to those who call them."""
    own: dict[Key, float] = {}
    for key, (_, _, own_s, _, callers) in stats.items():
        if key[0] != _BUILTIN:
            own[key] = own.get(key, 0.0) + own_s
            continue
        for caller, (_, _, callee_s, _) in callers.items():
            if caller[0] != _BUILTIN:
                own[caller] = own.get(caller, 0.0) + callee_s
    return {
        key: Spent(calls, 1e3 * own.get(key, 0.0), 1e3 * total_s)
        for key, (_, calls, _, total_s, _) in stats.items()
        if key[0] != _BUILTIN
    }


def compare(
    passes: str, load: str, few: tuple[int, Sequence[Any]], many: tuple[int, Sequence[Any]]
) -> Profile:
    """Put two profiles side by side.

    Args:
        passes: Label of the candidate that was on.
        load: What the engine was under.
        few: Number of requests, and the rows of `profile`.
        many: The same with more requests.
    """
    rows = [{tuple(row[:3]): Spent(*row[3:]) for row in found} for _, found in (few, many)]
    steps_ms = [sum(spent.own_ms for spent in found.values()) for found in rows]
    more = max(many[0] - few[0], 1)
    costs = []
    for key, spent in rows[1].items():
        share = spent.own_ms / steps_ms[1]
        if share < NOTICEABLE:
            continue
        before = rows[0].get(key, Spent(0.0, 0.0, 0.0))
        grown_us = 1e3 * (spent.own_ms - before.own_ms) / more
        costs.append(Cost(str(key[2]), _place(*key[:2]), before, spent, grown_us, share))
    costs.sort(key=lambda cost: (not cost.grows, -cost.many.own_ms))
    return Profile(passes, load, few[0], many[0], steps_ms[0], steps_ms[1], tuple(costs))


def _place(file: Any, line: Any) -> str:
    return f"{str(file).rpartition('/site-packages/')[2]}:{line}"
