"""All passes of this process: what was asked for, what happens to it, what children inherit."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

from ascend_opt import compile_key, registry
from ascend_opt import config as configuration
from ascend_opt.bisect_limit import BisectLimit
from ascend_opt.config import ENVIRONMENT, OPTIONS, Config, Policy, Request
from ascend_opt.engine import Engine, EngineWatch
from ascend_opt.errors import AscendOptError, NotApplicableError, ParameterError, RevertError
from ascend_opt.importing import imported, when_imported
from ascend_opt.parameters import as_dict, resolve
from ascend_opt.registry import Provided
from ascend_opt.reporting import Reporter
from ascend_opt.slot import Slot
from ascend_opt.states import Explanation, Mode, PassStatus, State

logger = logging.getLogger("vllm.ascend_opt")

_PATIENCE_S = 1.0


class Controller:
    """Keeps one slot for each pass that was asked for. Thread-safe, and right after a fork.

    A pass may import something while the lock is held (a traced patch's maker does). So a thread
    that imports a target does not wait long for the lock in our import hook, since others may wait
    for its import: who holds the lock takes the module in.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reading = threading.RLock()
        self._arrived: deque[ModuleType] = deque()  # imported, and not taken in yet
        self._slots: dict[str, Slot] = {}
        self._policy = Policy.SKIP
        self._inherited: str | None = None  # the environment variable as this process found it
        self._environment_read = False
        self._off = False
        self._engines: list[Engine] = []
        self._limit = BisectLimit()
        self._watch = EngineWatch(self._engine_started)
        self._reporter = Reporter(self._snapshot, self.look_after)
        os.register_at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=self._after_fork_in_parent,
            after_in_child=self._after_fork,
        )

    def enable(self, name: str, given: Mapping[str, Any]) -> PassStatus:
        """See `control.enable`."""
        provided = registry.discover().get(name)
        request = make_request(provided, given)
        self.read_environment()
        self.look_after()
        slot = Slot.prepare(provided, request)
        with self._exclusive():
            if self._off:
                logger.warning("ascend_opt: %s stays off: %s=off", name, ENVIRONMENT)
                return PassStatus(name, State.OFF, f"{ENVIRONMENT}=off", pid=os.getpid())
            slot = self._switch(slot)
            if not slot.usable:
                raise NotApplicableError(slot.verdict)
            self._export()
            return slot.status()

    def disable(self, name: str) -> PassStatus:
        """See `control.disable`."""
        provided = registry.discover().get(name)
        self.read_environment()
        with self._exclusive():
            slot = self._slots.get(name)
            if slot is None:
                return _off(provided)
            slot.revert()
            compiled = slot.changes_graph and slot.announced and bool(self._living())
            slot.refuse(
                State.OFF,
                "disabled; a model that was compiled before keeps calls that do nothing now, and a "
                "captured graph replays what it captured until the engine is started again"
                if compiled
                else "disabled",
            )
            self._export()
            if not any(other.on for other in self._slots.values()):
                self._watch.disarm()
            self._reporter.start()
            return slot.status()

    def load(self, config: Config) -> list[PassStatus]:
        """Switch on the passes of a checked configuration; if strict, all of them or none.

        Raises:
            NotApplicableError: The policy is strict and a pass cannot apply.
        """
        found = registry.discover()
        prepared = [Slot.prepare(found.get(r.name), r, from_config=True) for r in config.requests]
        with self._exclusive():
            self._off = self._off or config.off
            if self._off:
                return []
            _insist(config, prepared)
            before = dict(self._slots)
            slots = [self._try_switch(slot) for slot in prepared]
            try:
                _insist(config, slots)
            except NotApplicableError:
                for slot in slots:
                    if before.get(slot.name) is not self._slots.get(slot.name):
                        self._restore(slot.name, before.get(slot.name))
                raise
            self._policy = config.policy
            for slot in slots:
                if not slot.usable:
                    logger.warning("ascend_opt: %s", slot.verdict)
            return [slot.status() for slot in slots]

    def load_and_export(self, config: Config) -> list[PassStatus]:
        """`load`, and hand it down to child processes."""
        self.read_environment()
        statuses = self.load(config)
        with self._exclusive():
            self._export()
        return statuses

    def read_environment(self) -> None:
        """Apply `VLLM_ASCEND_OPT`, once for each process; what is wrong with it is one warning.

        Raises:
            NotApplicableError: Its policy is strict and a pass cannot apply.
        """
        registry.discover()  # imports: not under a lock that an importing thread may wait for
        # Others wait until all of it is applied: what they ask for comes after it.
        with self._reading:
            if not self._environment_read:
                self._environment_read = True
                self._inherited = os.environ.get(ENVIRONMENT)
                self._apply_environment()

    def _apply_environment(self) -> None:
        if not (self._inherited or "").strip():
            return
        try:
            classes = registry.discover().classes()
            config = configuration.from_environment(self._inherited or "", classes)
        except AscendOptError as error:
            logger.warning("ascend_opt: all passes stay off in this process: %s", error)
            return
        self.load(config)

    def status(self) -> list[PassStatus]:
        """See `control.status`."""
        self.look_after()
        known = registry.discover().passes
        with self._exclusive():
            return [
                self._slots[name].status() if name in self._slots else _off(known[name])
                for name in sorted({*known, *self._slots})
            ]

    def explain(self, name: str) -> Explanation:
        """See `control.explain`."""
        provided = registry.discover().get(name)
        default = Request(name, provided.cls.Parameters())
        with self._exclusive():
            slot, engines = self._slots.get(name), self._living()
        trial = Slot.prepare(provided, slot.request if slot else default)
        return trial.explanation(slot or trial, engines)

    def requests(self) -> dict[str, Request]:
        """Return what is armed, active or builtin in this process."""
        with self._exclusive():
            return {slot.name: slot.request for slot in self._slots.values() if slot.usable}

    def reset(self) -> None:
        """See `control.reset`."""
        with self._exclusive():
            for slot in self._slots.values():
                try:
                    slot.revert()
                except RevertError as error:
                    slot.instance.fail("reset")
                    logger.warning("ascend_opt: left in place, inert: %s", error)
            self._slots.clear()
            self._engines.clear()
            self._watch.disarm()
            if self._environment_read:
                _set_environment(self._inherited)
            self._environment_read = self._off = False
            self._policy = Policy.SKIP
            self._limit = BisectLimit()
            self._reporter.close()

    def graph_fingerprint(self) -> str | None:
        """Return a hash of all that our passes change in traced code; None if nothing."""
        with self._exclusive():
            facts = [
                [
                    slot.name,
                    slot.provided.cls.version,
                    as_dict(slot.request.parameters),
                    slot.targets(),
                ]
                for _, slot in sorted(self._slots.items())
                if slot.on and slot.changes_graph
            ]
        if not facts:
            return None
        text = json.dumps([_library_version(), *facts], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def look_after(self) -> None:
        """Follow up on what happened to passes since the last time."""
        with self._exclusive():
            for slot in self._slots.values():
                if slot.on:
                    slot.look_after()

    def _switch(self, slot: Slot) -> Slot:
        """Put a prepared slot in the place of the pass's present one, and return what came of it.

        Raises:
            RevertError: What is on cannot be taken out; it stays on.
        """
        self._admit(slot)
        old = self._slots.get(slot.name)
        if old is not None and old.on:
            if old.request == slot.request:
                return old
            if not slot.on:
                return slot  # the new parameters cannot apply: what is on stays on
            old.revert()
        self._slots[slot.name] = slot
        self._put_in_place(slot)
        if not slot.on and old is not None and old.on:
            self._restore(slot.name, old)
        return slot

    def _admit(self, slot: Slot) -> None:
        """Hold a prepared slot against the bisect limit and the engines of this process."""
        if slot.on:
            slot.leave_out(self._limit.left_out(slot.name, slot.targets()))
        for engine in self._living():
            if slot.on:
                slot.check(engine)

    def _try_switch(self, slot: Slot) -> Slot:
        try:
            return self._switch(slot)
        except RevertError as error:
            return slot.refuse(State.CONFLICT, f"it is on with other parameters: {error}")

    def _restore(self, name: str, old: Slot | None) -> None:
        """Put a slot back that `_switch` replaced; with a fresh pass, since its own is spent."""
        replaced = self._slots.pop(name)
        replaced.revert()
        if old is None:
            return
        if old.on:
            old = Slot.prepare(old.provided, old.request, old.from_config)
            self._admit(old)
        self._slots[name] = old
        self._put_in_place(old)

    def _living(self) -> list[Engine]:
        """Return the engines whose worker still exists."""
        self._engines = [engine for engine in self._engines if engine.worker() is not None]
        return list(self._engines)

    def _put_in_place(self, slot: Slot) -> None:
        if slot.on:
            slot.warn_of_unknown()
            compile_key.enter(self.graph_fingerprint)
            self._watch.arm()
            for name in slot.modules():
                when_imported(name, self._module_imported)
        self._reporter.start()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock, and leave no module behind that arrived meanwhile."""
        try:
            with self._lock:
                yield
        finally:
            self._take_in()

    def _module_imported(self, module: ModuleType) -> None:
        # Who holds the lock mostly lets go at once, and then the module is patched when its import
        # returns; who waits for this very import does not.
        self._arrived.append(module)
        self._take_in(wait_s=_PATIENCE_S)

    def _take_in(self, wait_s: float = 0.0) -> None:
        """Apply what the slots want to change in modules that arrived."""
        while self._arrived and self._lock.acquire(timeout=wait_s):
            try:
                while self._arrived:
                    module = self._arrived.popleft()
                    for slot in self._slots.values():
                        if slot.on:
                            slot.apply(module.__name__, module)
                    self._reporter.start()
            finally:
                self._lock.release()

    def _engine_started(self, engine: Engine) -> None:
        with self._exclusive():
            worker = engine.worker()
            if any(known.worker() is worker for known in self._living()):
                return  # seen again, since the watch was armed again
            self._engines.append(dataclasses.replace(engine, running=True))  # from now on
            for slot in [slot for slot in self._slots.values() if slot.on]:
                slot.check(engine)
                # Imports that no hook saw (a direct exec_module, a half-built module) count too.
                for name in slot.modules():
                    module = imported(name)
                    if slot.on and module is not None:
                        slot.apply(name, module)
                if not slot.on and slot.from_config and self._policy is Policy.STRICT:
                    raise NotApplicableError(f"policy strict, but {slot.verdict}")
        self._reporter.start()

    def _after_fork_in_parent(self) -> None:
        self._lock.release()
        self._take_in()

    def _after_fork(self) -> None:
        # The child starts with the parent's patches, and with counts of its own.
        self._lock = threading.RLock()
        self._reading = threading.RLock()
        for slot in self._slots.values():
            slot.instance.counters.clear()
        self._reporter.after_fork()  # last: its thread wants the new lock

    def _snapshot(self) -> tuple[list[PassStatus], int | None, int | None]:
        with self._exclusive():
            engines = self._living()
            rank, replica = (engines[-1].rank, engines[-1].replica) if engines else (None, None)
            return [slot.status() for slot in self._slots.values()], rank, replica

    def _export(self) -> None:
        """Hand what is asked for here down to child processes and Ray workers."""
        wanted = self.requests()
        text = configuration.dump(wanted, self._policy) if wanted or self._inherited else None
        _set_environment(text)


def _insist(config: Config, slots: list[Slot]) -> None:
    """Raise NotApplicableError if the policy is strict and a pass is not usable."""
    unable = [slot.verdict for slot in slots if not slot.usable]
    if unable and config.policy is Policy.STRICT:
        raise NotApplicableError(f"{config.place}: policy strict, but {'; '.join(unable)}")


@cache
def _library_version() -> str:
    try:
        return metadata.version("ascend-opt")
    except metadata.PackageNotFoundError:
        return "unknown"


def _set_environment(value: str | None) -> None:
    if value is None:
        os.environ.pop(ENVIRONMENT, None)
    else:
        os.environ[ENVIRONMENT] = value


def _off(provided: Provided) -> PassStatus:
    return PassStatus(provided.cls.name, State.OFF, "not enabled", pid=os.getpid())


def make_request(provided: Provided, given: Mapping[str, Any]) -> Request:
    """Return a checked request from what a user gave by name.

    Raises:
        ParameterError: No such parameter, or a value that it does not take.
    """
    cls = provided.cls
    raw = {key: value for key, value in given.items() if key not in OPTIONS}
    allow = given.get("allow_unknown", False)
    if not isinstance(allow, bool):
        raise ParameterError(f"{cls.name}: allow_unknown={allow!r}, expected True or False")
    classes = registry.discover().classes()
    mode = configuration.some_mode(cls, given.get("mode", Mode.ACTIVE), classes)
    targets = configuration.some_targets(cls, given.get("targets"), mode)
    return Request(cls.name, resolve(cls.name, cls.Parameters, raw), allow, targets, mode)
