"""verify: the same prompts without and with the passes, token by token.

The patched run goes first: if nothing was on in it, or a pass in shadow mode differed from the
original, two unpatched runs are not waited for. The unpatched engine runs twice, since what differs
between those two says nothing about a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ascend_opt.proof.activity import Activity, activities
from ascend_opt.proof.comparison import TOLERANCE, Comparison, Difference, compare
from ascend_opt.proof.engine_run import EngineRunError, Outcome, PromptSpec
from ascend_opt.proof.runner import Requests, Runner, as_plain, effects
from ascend_opt.shadow import COMPARED
from ascend_opt.states import Mode

MAX_TOKENS = 32


class Verdict(StrEnum):
    """What a verification found; only `equal` passes."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"
    NOTHING_ON = "nothing on"
    ENGINE_DIED = "engine died"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        verdict: See `Verdict`.
        reason: One line.
        passes: What was on, as in a configuration.
        prompts: Number of prompts.
        max_tokens: Tokens generated for each.
        tolerance: Difference of logprobs (nats) that counted as none.
        activity: What became of each pass; empty if the engine died.
        noise: The second unpatched run against the first; None if they were not run.
        patched: The patched run against the first unpatched one; None if they were not run.
        facts: Versions, device and engine.
        log: The tail of the log of an engine that died.
    """

    verdict: Verdict
    reason: str
    passes: dict[str, Any]
    prompts: int
    max_tokens: int
    tolerance: float
    activity: tuple[Activity, ...] = ()
    noise: Comparison | None = None
    patched: Comparison | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    @property
    def passed(self) -> bool:
        """Whether every pass was on and nothing differs."""
        return self.verdict is Verdict.EQUAL

    def blamed(self) -> list[Difference]:
        """Return the differences on prompts on which the unpatched runs agree."""
        if self.patched is None or self.noise is None:
            return []
        noisy = self.noise.prompts()
        return [d for d in self.patched.differences if d.prompt not in noisy]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as `--json` prints them."""
        first = next(iter(self.blamed()), None)
        return {
            "verdict": self.verdict,
            "passed": self.passed,
            "reason": self.reason,
            "passes": self.passes,
            "prompts": self.prompts,
            "max_tokens": self.max_tokens,
            "logprob_tolerance": self.tolerance,
            "first_difference": first.as_dict() if first else None,
            "activity": [activity.as_dict() for activity in self.activity],
            "noise": self.noise.as_dict() if self.noise else None,
            "patched": self.patched.as_dict() if self.patched else None,
            "facts": self.facts,
        }


def verify(
    runner: Runner,
    requests: Requests,
    prompts: Sequence[PromptSpec],
    max_tokens: int = MAX_TOKENS,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Run the engine with the passes and twice without, and compare.

    Raises:
        EngineInputError: vLLM does not take the arguments or the prompts.
        EngineRunError: The engine does not run without the passes either.
    """
    names = ", ".join(requests)
    told = as_plain(requests), len(prompts), max_tokens, tolerance

    died: EngineRunError | None = None
    patched: Outcome | None = None
    activity: tuple[Activity, ...] = ()
    try:
        patched = runner.generate("patched", f"with {names}", requests, prompts, max_tokens)
    except EngineRunError as error:
        died = error
        runner.progress.say(f"the engine died with {names}; trying it without")
    if patched is not None:
        activity = tuple(activities(requests, patched.records, effects(requests)))
        differing = [f"{a.name}: {a.difference}" for a in activity if a.difference]
        if differing:
            return Verification(
                Verdict.DIFFERENT, "; ".join(differing), *told, activity, facts=patched.facts
            )
        idle = [item for item in activity if item.problem]
        if idle:
            reason = "; ".join(f"{item.name}: {item.problem}" for item in idle)
            return Verification(
                Verdict.NOTHING_ON, reason, *told, activity=activity, facts=patched.facts
            )

    first = runner.generate("unpatched-1", "unpatched", {}, prompts, max_tokens)
    if patched is None:
        reason = f"the engine runs unpatched, and died with {names}"
        return Verification(Verdict.ENGINE_DIED, reason, *told, facts=first.facts, log=str(died))
    second = runner.generate("unpatched-2", "unpatched again", {}, prompts, max_tokens)
    noise = compare(first, second, tolerance)
    compared = compare(first, patched, tolerance)
    verdict, reason = judge(noise, compared)
    shadowed = [
        f"{item.name} was in shadow mode: {item.counters.get(COMPARED, 0)} calls compared, all "
        "equal; the tokens are the original's"
        for item in activity
        if item.mode is Mode.SHADOW
    ]
    reason = "; ".join([reason, *shadowed])
    return Verification(
        verdict, reason, *told, activity, noise, compared, {**first.facts, **patched.facts}
    )


def judge(noise: Comparison, patched: Comparison) -> tuple[Verdict, str]:
    """Decide what two comparisons with the first unpatched run say.

    Args:
        noise: Of the second unpatched run.
        patched: Of the patched run.
    """
    noisy = noise.prompts()
    blamed = [d for d in patched.differences if d.prompt not in noisy]
    note = f"; two unpatched runs already differ on {len(noisy)} prompts" if noisy else ""
    if any(d.tokens_differ for d in blamed):
        count = sum(d.tokens_differ for d in blamed)
        return Verdict.DIFFERENT, f"tokens differ on {count} prompts{note}"
    if blamed:
        apart = "tokens are equal, but logprobs are apart by more than the tolerance"
        return Verdict.DIFFERENT, f"{apart} on {len(blamed)} prompts{note}"
    if noisy:
        where = f"two unpatched runs already differ on {len(noisy)} prompts"
        advice = "try -- --max-num-seqs 1, or VLLM_BATCH_INVARIANT=1 where it is supported"
        return Verdict.UNDECIDED, f"{where}, where equality cannot be shown; {advice}"
    return Verdict.EQUAL, f"{patched.tokens_equal} of {patched.tokens} tokens equal"
