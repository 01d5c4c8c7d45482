"""The state of a pass in one process, and what `status` and `explain` say of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Mode(StrEnum):
    """How a pass is on: it does its work, or compares what it would do with the original's."""

    ACTIVE = "active"
    SHADOW = "shadow"


class State(StrEnum):
    """State of a pass in one process; every state but `active` carries a reason."""

    OFF = "off"
    ARMED = "armed"
    ACTIVE = "active"
    BUILTIN = "builtin"
    INAPPLICABLE = "inapplicable"
    CONFLICT = "conflict"
    FAILED = "failed"

    def shown(self, mode: Mode) -> str:
        """Return how tables show it: `active (shadow)` for a pass that is on in shadow mode."""
        shadowed = mode is Mode.SHADOW and self in (State.ARMED, State.ACTIVE)
        return f"{self} ({mode})" if shadowed else str(self)


@dataclass(frozen=True)
class TargetStatus:
    """One target of a pass in this process.

    Attributes:
        target: `package.module:Qual.name`.
        variant: The recognised variant of its source, or None.
        patched: Whether our patch is in place now.
        note: What else there is to say, such as a stale binding; empty if nothing.
    """

    target: str
    variant: str | None
    patched: bool
    note: str = ""


@dataclass(frozen=True)
class PassStatus:
    """What one pass is and did in one process.

    Attributes:
        name: The pass.
        state: See `State`.
        reason: One line; for `active`, what the pass does here.
        parameters: Resolved parameters, plain values.
        targets: One entry for each patch of the pass.
        counters: What the pass did in this process so far; empty unless patched.
        pid: The process.
        mode: See `Mode`.
    """

    name: str
    state: State
    reason: str
    parameters: dict[str, Any] = field(default_factory=dict)
    targets: tuple[TargetStatus, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    pid: int = 0
    mode: Mode = Mode.ACTIVE

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as `--json` and the record files show them."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Finding:
    """What became of one condition.

    Attributes:
        name: The condition.
        stage: `install`, `engine` or `step`.
        description: When the condition holds.
        holds: None where it cannot be decided here (no engine, no batch).
        detail: What was found.
    """

    name: str
    stage: str
    description: str
    holds: bool | None
    detail: str


@dataclass(frozen=True)
class TargetReport:
    """What stands at one target on disk.

    Attributes:
        target: `package.module:Qual.name`.
        kind: `host` or `traced`.
        file: Source file, or None where it is missing.
        line: Line of the definition, 1-based.
        fingerprint: Normalised hash of the source.
        variant: Recognised variant, or None.
        action: `patch`, `leave`, `builtin`, `missing` or `unknown`.
    """

    target: str
    kind: str
    file: str | None
    line: int | None
    fingerprint: str | None
    variant: str | None
    action: str


@dataclass(frozen=True)
class Explanation:
    """Everything there is to know about a pass here, before or after it is enabled.

    Attributes:
        name, summary, origin, version, distribution, remove_when: The pass's own facts.
        state: The state it has, or would have if it were enabled, in this installation.
        reason: Why.
        parameters: Name to resolved or default value.
        findings: One for each condition.
        targets: One for each target.
        mode: The mode that was asked for, `active` if none was.
        can_shadow: Whether the pass has a shadow mode.
    """

    name: str
    summary: str
    origin: str
    version: str
    distribution: str
    remove_when: str
    state: State
    reason: str
    parameters: dict[str, Any]
    findings: tuple[Finding, ...]
    targets: tuple[TargetReport, ...]
    mode: Mode = Mode.ACTIVE
    can_shadow: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)
