"""Was it on? What the processes of an engine say of the passes that were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_opt.shadow import DIFFERED
from ascend_opt.states import Mode, State

_NOT_THERE = "no process of the engine reports it: is it filtered out by VLLM_PLUGINS?"


@dataclass(frozen=True)
class Activity:
    """What became of one pass in an engine.

    Attributes:
        name: The pass.
        states: State to the number of processes in it.
        counters: Sums over the processes in which it is active.
        problem: Why it cannot be said to have been on; None if it was.
        mode: Whether it did its work, or had it compared only.
        difference: What a comparison in shadow mode found; None if nothing, or not in shadow mode.
    """

    name: str
    states: dict[str, int]
    counters: dict[str, int]
    problem: str | None
    mode: Mode = Mode.ACTIVE
    difference: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


def activities(
    names: Iterable[str], records: Sequence[Mapping[str, Any]], effects: Mapping[str, str]
) -> list[Activity]:
    """Return what became of each pass.

    Args:
        names: The passes that were asked for.
        records: The records of the engine's processes.
        effects: Pass name to the counter that grows when the pass does its work.
    """
    return [_activity(name, records, effects.get(name, "steps")) for name in names]


def _activity(name: str, records: Sequence[Mapping[str, Any]], effect: str) -> Activity:
    found = [(r, s) for r in records for s in r["passes"] if s["name"] == name]
    modes = [Mode(status.get("mode", Mode.ACTIVE)) for _, status in found]
    states = Counter(
        State(status["state"]).shown(mode) for (_, status), mode in zip(found, modes, strict=True)
    )
    counters: Counter[str] = Counter()
    for _, status in found:
        if status["state"] == State.ACTIVE:
            counters.update(status["counters"])
    differences = [
        f"process {record['pid']}: {status['reason']}"
        for record, status in found
        if status["counters"].get(DIFFERED)
    ]
    return Activity(
        name,
        dict(states),
        dict(counters),
        _problem(found, counters, effect),
        Mode.SHADOW if Mode.SHADOW in modes else Mode.ACTIVE,
        differences[0] if differences else None,
    )


def _problem(
    found: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    counters: Mapping[str, int],
    effect: str,
) -> str | None:
    if not found:
        return _NOT_THERE
    # A process that patches nothing stays armed; any other state says that something is wrong.
    for state in (State.FAILED, State.CONFLICT, State.INAPPLICABLE, State.BUILTIN, State.OFF):
        for record, status in found:
            if status["state"] == state:
                return f"{state} in process {record['pid']}: {status['reason']}"
    active = [(record, status) for record, status in found if status["state"] == State.ACTIVE]
    if not active:
        return f"never active in any process: {found[0][1]['reason']}"
    for record, status in active:
        # Only a worker runs the model; others may import, and so patch, the same module.
        if record["rank"] is not None and not any(status["counters"].values()):
            return f"active in the worker of rank {record['rank']}, but it never ran there"
    if counters.get(effect, 0):
        return None
    if counters.get("steps", 0) and not counters.get("held", 0):
        return f"its condition never held, in {counters['steps']} steps"
    return f"it did nothing: its counter {effect!r} is 0 ({_listed(counters)})"


def _listed(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in counters.items()) or "no counters"
