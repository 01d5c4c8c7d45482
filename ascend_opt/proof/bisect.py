"""bisect: the smallest set of passes, then of targets, with which the engine goes wrong.

Delta debugging (Zeller and Hildebrandt, ddmin): halves first, so one culprit among n takes about
2 log2 n runs; then complements, and finer parts, so a set that is wrong only together is found
too. The set it gives is 1-minimal: take any one member out and the engine is right again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ascend_opt import registry
from ascend_opt.config import Request
from ascend_opt.proof.activity import activities
from ascend_opt.proof.comparison import TOLERANCE, compare
from ascend_opt.proof.engine_run import EngineRunError, Outcome, PromptSpec
from ascend_opt.proof.runner import Requests, Runner, effects
from ascend_opt.slot import Slot

Item = TypeVar("Item")
Part = tuple[str, str]
"""A pass and one of its targets."""


def smallest(items: Sequence[Item], is_wrong: Callable[[Sequence[Item]], bool]) -> tuple[Item, ...]:
    """Return a 1-minimal part of `items` that is wrong, in the same order.

    Args:
        items: What is wrong as a whole.
        is_wrong: Asked of parts, each at most once.
    """
    known: dict[tuple[int, ...], bool] = {}

    def wrong(indices: Sequence[int]) -> bool:
        key = tuple(indices)
        if key not in known:
            known[key] = is_wrong([items[index] for index in key])
        return known[key]

    left, parts = list(range(len(items))), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        chunks = [left[start : start + size] for start in range(0, len(left), size)]
        rests = [[i for i in left if i not in chunk] for chunk in chunks]
        for part in chunks:
            if wrong(part):
                left, parts = part, 2
                break
        else:
            # With two chunks the complements are the chunks.
            for part in rests if len(chunks) > 2 else ():
                if wrong(part):
                    left, parts = part, max(parts - 1, 2)
                    break
            else:
                if parts >= len(left):
                    break
                parts = min(2 * parts, len(left))
    return tuple(items[index] for index in left)


@dataclass(frozen=True)
class Trial:
    """One run of a bisection.

    Attributes:
        number: From 1.
        on: What was on: pass to its targets, None for all of them.
        wrong: Whether the engine went wrong.
        finding: What came of it, in one line.
    """

    number: int
    on: dict[str, list[str] | None]
    wrong: bool
    finding: str

    def __str__(self) -> str:
        on = [
            name if targets is None else f"{name} ({', '.join(targets)})"
            for name, targets in self.on.items()
        ]
        return f"{self.number}: {', '.join(on) or 'nothing'}: {self.finding}"


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`.

    Attributes:
        passes: The culprits; empty if nothing is wrong, or the engine is wrong by itself.
        targets: The culprits among their targets.
        reason: One line.
        wrong: Whether the engine goes wrong with everything on.
        trials: Every run, in order.
        last: What the smallest wrong set did.
    """

    passes: tuple[str, ...]
    targets: tuple[Part, ...]
    reason: str
    wrong: bool
    trials: tuple[Trial, ...]
    last: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as `--json` prints them."""
        return {**dataclasses.asdict(self), "found": bool(self.passes)}


@dataclass
class _Search:
    runner: Runner
    requests: Requests
    prompts: Sequence[PromptSpec]
    max_tokens: int
    tolerance: float
    expected: Outcome | None = None
    last: Outcome | None = None
    trials: list[Trial] = field(default_factory=list)

    def run(self, requests: Requests) -> tuple[Outcome | None, str]:
        number = len(self.trials) + 1
        names = ", ".join(requests) or "nothing"
        try:
            outcome = self.runner.generate(
                f"run-{number}",
                f"run {number}, {names} on",
                requests,
                self.prompts,
                self.max_tokens,
            )
        except EngineRunError as error:
            if not requests:
                raise
            return None, f"the engine died: {str(error).splitlines()[0]}"
        return outcome, ""

    def wrong(self, requests: Requests) -> bool:
        """Run with these passes and say whether the engine goes wrong."""
        outcome, finding = self.run(requests)
        wrong, self.last = outcome is None, outcome
        if outcome is not None:
            assert self.expected is not None
            compared = compare(self.expected, outcome, self.tolerance)
            found = activities(requests, outcome.records, effects(requests))
            differing = [f"{a.name}, {a.difference}" for a in found if a.difference]
            wrong = bool(differing) or not compared.equal
            first = differing[0] if differing else next(iter(compared.differences), None)
            finding = f"WRONG: {first}" if wrong else "equal"
        on = {
            name: None if request.targets is None else list(request.targets)
            for name, request in requests.items()
        }
        self.note(Trial(len(self.trials) + 1, on, wrong, finding))
        return wrong

    def note(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.runner.progress.say(str(trial))

    def result(
        self, reason: str, passes: Sequence[str] = (), targets: Sequence[Part] = ()
    ) -> Bisection:
        wrong = [trial for trial in self.trials if trial.wrong]
        return Bisection(
            tuple(passes),
            tuple(targets),
            reason,
            bool(wrong),
            tuple(self.trials),
            wrong[-1].finding if wrong else "",
        )


def bisect(
    runner: Runner,
    requests: Requests,
    prompts: Sequence[PromptSpec],
    max_tokens: int,
    tolerance: float = TOLERANCE,
) -> Bisection:
    """Find the smallest set of passes, then of their targets, that makes the engine go wrong.

    Raises:
        EngineInputError: vLLM does not take the arguments or the prompts.
        EngineRunError: The engine does not run unpatched.
    """
    search = _Search(runner, requests, prompts, max_tokens, tolerance)
    search.expected = runner.generate("run-1", "run 1, unpatched", {}, prompts, max_tokens)
    search.note(Trial(1, {}, False, "what the others are compared with"))
    if search.wrong({}):
        return search.result(
            "two unpatched runs already differ, so a difference says nothing about a pass; try "
            "-- --max-num-seqs 1, or a larger --logprob-tolerance"
        )
    if not search.wrong(requests):
        assert search.last is not None
        found = activities(requests, search.last.records, effects(requests))
        idle = [f"{item.name}: {item.problem}" for item in found if item.problem]
        but = f", but not all were on: {'; '.join(idle)}" if idle else ""
        return search.result(f"nothing is wrong with {', '.join(requests)}{but}")

    def some(names: Sequence[str]) -> bool:
        return search.wrong({name: requests[name] for name in names})

    # All of them are wrong already, so the whole is never asked again.
    passes = smallest(tuple(requests), some)
    parts = [(name, target) for name in passes for target in targets_of(requests[name])]

    def some_targets(chosen: Sequence[Part]) -> bool:
        return search.wrong(restricted(requests, chosen))

    targets = smallest(parts, some_targets) if len(parts) > len(passes) else tuple(parts)
    together = " together" if len(passes) > 1 else ""
    where = ", ".join(f"{target} of {name}" for name, target in targets)
    return search.result(f"{' and '.join(passes)}{together}, at {where}", passes, targets)


def targets_of(request: Request) -> list[str]:
    """Return the targets that a pass would patch here."""
    provided = registry.discover().get(request.name)
    found = Slot.prepare(provided, request).targets()
    return found or [str(p.target) for p in provided.cls.patches if p.applies_in(request.mode)]


def restricted(requests: Requests, parts: Sequence[Part]) -> dict[str, Request]:
    """Return the passes with only these of their targets."""
    chosen: dict[str, list[str]] = {}
    for name, target in parts:
        chosen.setdefault(name, []).append(target)
    return {
        name: dataclasses.replace(requests[name], targets=tuple(targets))
        for name, targets in chosen.items()
    }
