"""What a soak has to show in the end, and what is wrong if it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from soak.memory import MIB, Held, slope

from ascend_opt.states import PassStatus, State

MAX_GROWTH = 0.5 * MIB
"""Bytes a minute by which the patched server may grow faster than its twin.

docs/testing.md says what two unpatched servers were measured to differ by, and which leak the
bound finds.
"""
SETTLED_SECONDS = 300
UNSETTLED_GROWTH = 30 * MIB
"""The bound for a run whose second half begins before servers stop growing by themselves."""

ENOUGH_TOKENS = 100

PREEMPTIONS = "vllm:num_preemptions_total"
GENERATED = "vllm:generation_tokens_total"
PROMPTS = "vllm:prompt_tokens_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class Mark:
    """What the patched server said at one moment.

    Attributes:
        seconds: When, since the load began.
        metrics: As `Twin.metrics` gives them.
        passes: Of its worker.
    """

    seconds: float
    metrics: Counter[str]
    passes: Sequence[PassStatus]


class Effect(NamedTuple):
    """What a pass at work shows: its counter grows whenever vLLM's does."""

    counter: str
    whenever: str = GENERATED


def idle_passes(marks: Sequence[Mark], active: Mapping[str, Effect]) -> Iterator[str]:
    """Yield what is wrong with the passes: not on, or without an effect from a mark to the next.

    A pass's counters are up to a second older than vLLM's, so a few tokens prove nothing.

    Args:
        marks: In order.
        active: The passes that have to be active, each with its effect.
    """
    for mark in marks:
        states = {status.name: status for status in mark.passes}
        for name in active:
            status = states.get(name)
            if status is None or status.state is not State.ACTIVE:
                found = f"{status.state}: {status.reason}" if status else "not in the worker"
                yield f"{name} at {mark.seconds:.0f} s: {found}"
    for before, after in pairwise(marks):
        done = after.metrics - before.metrics
        for name, (counter, whenever) in active.items():
            if done[whenever] >= ENOUGH_TOKENS and not done[f"{name}:{counter}"]:
                yield (
                    f"{name} did nothing from {before.seconds:.0f} to {after.seconds:.0f} s: "
                    f"{counter} stays at {after.metrics[f'{name}:{counter}']}"
                )


def mute_passes(passes: Sequence[PassStatus], asked: Mapping[str, object]) -> Iterator[str]:
    """Yield the passes that were asked for and do not say what became of them."""
    reasons = {status.name: status.reason for status in passes}
    for name in asked:
        if not reasons.get(name):
            yield f"{name} gives no reason for its state"


def growth(unpatched: Sequence[Held], patched: Sequence[Held]) -> float:
    """Return by how many bytes a minute the patched server grows faster in the second half."""
    return slope(second_half(patched)) - slope(second_half(unpatched))


def second_half(samples: Sequence[Held]) -> Sequence[Held]:
    """Return the samples of the second half of the time."""
    middle = (samples[0].seconds + samples[-1].seconds) / 2 if samples else 0
    return [sample for sample in samples if sample.seconds >= middle]


def leaks(unpatched: Sequence[Held], patched: Sequence[Held]) -> Iterator[str]:
    """Yield what is wrong with the memory."""
    found = growth(unpatched, patched)
    begin = next((sample.seconds for sample in second_half(patched)), 0)
    bound = MAX_GROWTH if begin >= SETTLED_SECONDS else UNSETTLED_GROWTH
    if found > bound:
        yield (
            f"the patched server's memory grows {found / MIB:.2f} MiB a minute faster than its "
            f"twin's, more than {bound / MIB:.2f}"
        )


def left_open(unpatched: tuple[Held, Held], patched: tuple[Held, Held]) -> Iterator[str]:
    """Yield what is wrong with handles and threads, given what idle servers held early and late."""
    for what in ("handles", "threads"):
        ours, twins = (getattr(b, what) - getattr(a, what) for a, b in (patched, unpatched))
        if ours > max(twins, 0):
            yield f"the patched server has {ours} {what} more than after warm-up, its twin {twins}"


def not_exercised(cancelled: int, preemptions: Mapping[str, int]) -> Iterator[str]:
    """Yield what the load was to bring about and did not."""
    if not cancelled:
        yield "no request was cancelled"
    for twin, number in preemptions.items():
        if not number:
            yield f"no request was preempted, {twin}"
