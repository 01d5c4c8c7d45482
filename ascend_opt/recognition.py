"""Recognising what is installed: each patch's target against the fingerprints that it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ascend_opt.base import BUILTIN, Pass, Patch
from ascend_opt.states import State, TargetReport
from ascend_opt.targets import Source, Target, locate


class Action(StrEnum):
    """What is to be done with a target."""

    PATCH = "patch"
    LEAVE = "leave"
    BUILTIN = "builtin"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Recognition:
    """One patch's target as it stands on disk."""

    patch: Patch
    source: Source | None
    variant: str | None
    action: Action

    def report(self) -> TargetReport:
        """Return it as `explain` shows it."""
        source = self.source
        return TargetReport(
            target=str(self.patch.target),
            kind=self.patch.kind,
            file=str(source.file) if source else None,
            line=source.line if source else None,
            fingerprint=source.fingerprint if source else None,
            variant=self.variant,
            action=self.action,
        )


@dataclass(frozen=True)
class Verdict:
    """Whether a pass can be on, given its recognised targets; `state` is `armed` if it can."""

    state: State
    reason: str


Find = Callable[[Target], Source | None]


def recognise(patch: Patch, find: Find = locate) -> Recognition:
    """Look one target up on disk, where `find` looks for it; imports nothing."""
    source = find(patch.target)
    if source is None:
        return Recognition(patch, None, None, Action.LEAVE if patch.optional else Action.MISSING)
    variant = patch.known.get(source.fingerprint)
    if variant is None:
        action = Action.UNKNOWN
    elif variant == BUILTIN:
        action = Action.BUILTIN
    elif variant in patch.leave:
        action = Action.LEAVE
    else:
        action = Action.PATCH
    return Recognition(patch, source, variant, action)


def recognise_all(cls: type[Pass], find: Find = locate) -> tuple[Recognition, ...]:
    """Look all targets of a pass up on disk."""
    return tuple(recognise(patch, find) for patch in cls.patches)


def judge(recognitions: Iterable[Recognition], allow_unknown: bool) -> Verdict:
    """Decide over all targets of a pass before any of them is touched.

    Args:
        recognitions: One for each patch.
        allow_unknown: Patch unrecognised sources too; the caller has warned about it.
    """
    found = list(recognitions)
    for item in found:
        if item.action is Action.MISSING:
            return Verdict(State.INAPPLICABLE, f"{item.patch.target} is not there")
        if item.action is Action.UNKNOWN and not allow_unknown:
            assert item.source is not None
            return Verdict(
                State.INAPPLICABLE,
                f"unknown source of {item.patch.target} "
                f"(sha {item.source.fingerprint}, {item.source})",
            )
    if not any(item.action in (Action.PATCH, Action.UNKNOWN) for item in found):
        if any(item.action is Action.BUILTIN for item in found):
            return Verdict(State.BUILTIN, "this release already does it")
        return Verdict(State.INAPPLICABLE, "nothing to patch in this release")
    return Verdict(State.ARMED, "")
