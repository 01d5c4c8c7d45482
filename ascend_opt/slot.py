"""One pass in one process: its state, and its patches in and out."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ascend_opt import bisect_limit
from ascend_opt.base import Pass
from ascend_opt.conditions import Condition, Stage
from ascend_opt.config import Request
from ascend_opt.engine import Engine, EngineWatch
from ascend_opt.errors import ConflictError, PatchError, RevertError
from ascend_opt.parameters import as_dict
from ascend_opt.patching import Applied, apply
from ascend_opt.recognition import Action, Recognition, judge, recognise_all
from ascend_opt.registry import Provided
from ascend_opt.states import Explanation, Finding, Mode, PassStatus, State, TargetStatus

logger = logging.getLogger("vllm.ascend_opt")


@dataclass
class Slot:
    """A pass that was asked for.

    Attributes:
        provided: The pass class and its distribution.
        request: Parameters and options.
        instance: The pass with these parameters.
        recognitions: What stands at its targets.
        state: See `State`.
        reason: See `PassStatus`.
        from_config: Asked for by a configuration, not by a call of `enable`.
        applied: Patches in place, by target.
        checked: An engine has started and every engine condition held.
        announced: The pass has been active, and a line in the log said so.
        left_out: Targets that `VLLM_ASCEND_OPT_BISECT_LIMIT` leaves alone.
    """

    provided: Provided
    request: Request
    instance: Pass
    recognitions: tuple[Recognition, ...]
    state: State
    reason: str
    from_config: bool = False
    applied: dict[str, Applied] = field(default_factory=dict)
    checked: bool = False
    announced: bool = False
    left_out: frozenset[str] = frozenset()

    @classmethod
    def prepare(cls, provided: Provided, request: Request, from_config: bool = False) -> Slot:
        """Find out whether a pass can be on in this installation; changes nothing."""
        flaw = None
        try:
            instance = provided.cls(request.parameters)
        except Exception as error:
            flaw = f"the pass could not be made: {error!r}"
            instance = provided.cls.__new__(provided.cls)
            Pass.__init__(instance, request.parameters)
        recognitions = recognise_all(provided.cls)
        instance.variants = {
            str(r.patch.target): r.variant for r in recognitions if r.variant is not None
        }
        slot = cls(provided, request, instance, recognitions, State.ARMED, "", from_config)
        if flaw is not None:
            return slot.refuse(State.FAILED, flaw)
        for condition in provided.cls.conditions:
            if condition.stage is Stage.INSTALL:
                unmet = slot.ask(condition, None)
                if unmet is not None:
                    return slot.refuse(State.INAPPLICABLE, unmet)
        verdict = judge(recognitions, request.allow_unknown)
        if verdict.state is not State.ARMED:
            return slot.refuse(verdict.state, verdict.reason)
        if slot.shadowed and not slot.to_patch():
            return slot.refuse(State.INAPPLICABLE, "nothing to compare in this release")
        try:
            unmet = instance.unmet() or EngineWatch.unmet()
        except Exception as error:
            unmet = f"the pass's own check failed: {error!r}"
        if unmet is not None:
            return slot.refuse(State.INAPPLICABLE, unmet)
        slot.settle()
        return slot

    @property
    def name(self) -> str:
        """The pass's name."""
        return self.request.name

    @property
    def verdict(self) -> str:
        """What became of the pass, as a clause for a message."""
        return f"{self.name} is {self.state}: {self.reason}"

    @property
    def shadowed(self) -> bool:
        """Whether the pass was asked for in shadow mode."""
        return self.request.mode is Mode.SHADOW

    @property
    def changes_graph(self) -> bool:
        """Whether torch.compile traces something else than without the pass."""
        return self.provided.cls.changes_graph and not self.shadowed

    @property
    def on(self) -> bool:
        """Whether the pass is armed or active."""
        return self.state in (State.ARMED, State.ACTIVE)

    @property
    def usable(self) -> bool:
        """Whether the user has what they asked for, or will."""
        bisected = self.state is State.OFF and bool(self.left_out)
        return self.on or self.state is State.BUILTIN or bisected

    def to_patch(self) -> list[Recognition]:
        """Return the targets that this pass changes here."""
        return [
            r
            for r in self.recognitions
            if r.action in (Action.PATCH, Action.UNKNOWN)
            and self._chosen(str(r.patch.target))
            and r.patch.applies_in(self.request.mode)
        ]

    def _chosen(self, target: str) -> bool:
        chosen = self.request.targets
        return target not in self.left_out and (chosen is None or target in chosen)

    def _left_out(self, recognition: Recognition) -> str:
        if self._chosen(str(recognition.patch.target)):
            return ""
        return "left out, to find a patch that is wrong"

    def targets(self) -> list[str]:
        """Return the names of these targets."""
        return [str(r.patch.target) for r in self.to_patch()]

    def leave_out(self, targets: frozenset[str]) -> None:
        """Leave some targets alone, before anything is patched."""
        self.left_out = targets
        if not self.to_patch():
            self.refuse(State.OFF, f"{bisect_limit.ENVIRONMENT} leaves none of its patches")

    def modules(self) -> list[str]:
        """Return the modules of these targets."""
        return sorted({r.patch.target.module for r in self.to_patch()})

    def refuse(self, state: State, reason: str) -> Slot:
        """Set a state that is not on, with its reason."""
        self.state, self.reason = state, reason
        return self

    def settle(self) -> None:
        """Work out whether the pass is armed or active from what has happened so far."""
        needs_engine = any(c.stage is Stage.ENGINE for c in self.provided.cls.conditions)
        if not self.applied:
            self.state = State.ARMED
            self.reason = f"waiting for the import of {', '.join(self.modules())}"
        elif needs_engine and not self.checked:
            self.state = State.ARMED
            self.reason = "patched; no engine has started in this process"
        else:
            self.state = State.ACTIVE
            try:
                does = self.instance.applied()
            except Exception as error:
                self.withdraw(State.FAILED, f"applied() raised {error!r}")
                return
            self.reason = does
            if self.shadowed:
                self.reason = f"compared with the original, not used: {does}".removesuffix(": ")
            if not self.announced:
                self.announced = True
                shown = self.state.shown(self.request.mode)
                logger.info("ascend_opt: %s is %s: %s", self.name, shown, self.reason)

    def warn_of_unknown(self) -> None:
        """Say loudly that `allow_unknown` is about to patch something unrecognised."""
        unknown = [r for r in self.to_patch() if r.action is Action.UNKNOWN]
        if unknown:
            logger.warning(
                "ascend_opt: %s PATCHES UNKNOWN SOURCE because of allow_unknown: %s",
                self.name,
                ", ".join(f"{r.patch.target} ({r.source})" for r in unknown),
            )

    def apply(self, name: str, module: ModuleType) -> None:
        """Apply what the pass wants to change in the module of that name."""
        here = [
            r
            for r in self.to_patch()
            if r.patch.target.module == name and str(r.patch.target) not in self.applied
        ]
        if not here:
            return
        try:
            for recognition in here:
                applied = apply(self.instance, recognition, module, self.request.mode)
                self.applied[str(recognition.patch.target)] = applied
                if applied.stale:
                    logger.warning("ascend_opt: %s: %s", self.name, _note(applied))
        except ConflictError as error:
            self.withdraw(State.CONFLICT, str(error))
        except PatchError as error:
            self.withdraw(State.FAILED, str(error))
        except Exception as error:
            self.withdraw(State.FAILED, f"{recognition.patch.target}: {error!r}")
        else:
            self.settle()

    def check(self, engine: Engine) -> None:
        """Ask the engine conditions; what one engine refuses is off in this process."""
        for condition in self.provided.cls.conditions:
            if condition.stage is not Stage.ENGINE:
                continue
            unmet = self.ask(condition, engine.config)
            if unmet is not None:
                self.withdraw(State.INAPPLICABLE, unmet)
                return
        self.checked = True
        if engine.running and self.changes_graph:
            logger.warning(
                "ascend_opt: %s was enabled after an engine had started: a model that is already "
                "compiled or captured keeps the code that it has",
                self.name,
            )
        self.settle()

    def ask(self, condition: Condition, subject: Any) -> str | None:
        """Return what `Condition.unmet` says; what cannot be decided does not hold."""
        try:
            return condition.unmet(subject, self.request.parameters)
        except Exception as error:
            return f"{condition.name} could not be decided: {error!r}"

    def look_after(self) -> None:
        """Follow up on a failure at run time, and on patches that others replaced."""
        if self.instance.failure is not None:
            self.withdraw(State.FAILED, self.instance.failure)
            return
        for target, applied in self.applied.items():
            other = applied.replaced_by()
            if other is not None:
                self.withdraw(State.CONFLICT, f"{target} was replaced later by {other}")
                return

    def revert(self) -> None:
        """Take all patches out, or none.

        What still holds our code (a bound method kept, a compiled model) runs as if unpatched.

        Raises:
            RevertError: One is covered by someone else's; all are in place as before.
        """
        if not self.applied:
            return
        for applied in self.applied.values():
            if applied.covered_by() is not None:
                applied.revert()  # raises, before anything was changed
        for applied in self.applied.values():
            applied.revert()
        self.applied.clear()
        self._fail("switched off")
        try:
            self.instance.reverted()
        except Exception:
            logger.exception("ascend_opt: %s: reverted() failed; its patches are out", self.name)

    def withdraw(self, state: State, reason: str) -> None:
        """Switch the pass off by ourselves: its patches out or, where covered, inert."""
        self.refuse(state, reason)
        self._fail(reason)
        try:
            self.revert()
        except RevertError as error:
            self.reason = f"{reason} (left in place, inert: {error})"
        logger.warning("ascend_opt: %s", self.verdict)

    def _fail(self, reason: str) -> None:
        try:
            self.instance.fail(reason)
        except Exception:
            logger.exception("ascend_opt: %s: its own fail() failed; its patches go out", self.name)
            Pass.fail(self.instance, reason)

    def status(self) -> PassStatus:
        """Return what `status` shows of it."""
        targets = tuple(
            TargetStatus(
                target=str(r.patch.target),
                variant=r.variant,
                patched=str(r.patch.target) in self.applied,
                note=self._left_out(r) or _note(self.applied.get(str(r.patch.target))),
            )
            for r in self.recognitions
        )
        return PassStatus(
            name=self.name,
            state=self.state,
            reason=self.reason,
            parameters=as_dict(self.request.parameters),
            targets=targets,
            counters=dict(self.instance.counters),
            pid=os.getpid(),
            mode=self.request.mode,
        )

    def explanation(self, shown: Slot, engines: list[Engine]) -> Explanation:
        """Return everything there is to know about the pass, with the state of `shown`."""
        cls = self.provided.cls
        return Explanation(
            name=self.name,
            summary=cls.summary(),
            origin=cls.origin,
            version=cls.version,
            distribution=self.provided.distribution,
            remove_when=cls.remove_when,
            state=shown.state,
            reason=shown.reason,
            parameters=as_dict(self.request.parameters),
            findings=self.findings(engines),
            targets=tuple(recognition.report() for recognition in self.recognitions),
            mode=self.request.mode,
            can_shadow=cls.can_shadow(),
        )

    def findings(self, engines: list[Engine]) -> tuple[Finding, ...]:
        """Return what became of each condition, asked of the engines in this process."""
        found = []
        for condition in self.provided.cls.conditions:
            holds: bool | None = None
            detail = "decided for each batch at run time"
            if condition.stage is Stage.INSTALL:
                unmet = self.ask(condition, None)
                holds, detail = unmet is None, unmet or "holds"
            elif condition.stage is Stage.ENGINE:
                reasons = [self.ask(condition, engine.config) for engine in engines]
                holds = all(r is None for r in reasons) if engines else None
                detail = next((r for r in reasons if r), "holds" if engines else "no engine here")
            found.append(
                Finding(condition.name, condition.stage, condition.description, holds, detail)
            )
        return tuple(found)


def _note(applied: Applied | None) -> str:
    if applied is None or not applied.stale:
        return ""
    return f"not patched where it was imported by name before: {', '.join(applied.stale)}"
