"""Seeing engines start: every worker of vLLM begins in `WorkerBase.__init__`, before its model.

Engine conditions need the real `VllmConfig`, and nothing gives it to a plugin: inside the plugin
function there is no current configuration yet.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from ascend_opt.errors import NotApplicableError
from ascend_opt.importing import imported, is_complete, when_imported
from ascend_opt.targets import Target, locate, reaches

logger = logging.getLogger("vllm.ascend_opt")

TARGET = Target("vllm.v1.worker.worker_base", "WorkerBase.__init__")


@dataclass(frozen=True)
class Engine:
    """An engine's worker in this process.

    Attributes:
        config: Its `VllmConfig`.
        rank: Its rank among the workers of this engine.
        running: Whether the worker existed before we looked, so that its model may be built.
        worker: Weak reference to the worker: what a dead one refused counts no longer.
    """

    config: Any
    rank: int | None
    running: bool
    worker: Callable[[], Any]

    @property
    def replica(self) -> int:
        """Which of the data-parallel engines this is; 0 if there is one."""
        parallel = getattr(self.config, "parallel_config", None)
        # Engines of a dense model run alone: their own rank is 0, and the index says which.
        index = getattr(parallel, "data_parallel_index", None)
        return int(index if index is not None else getattr(parallel, "data_parallel_rank", 0))


def _instances(cls: type) -> list[Any]:
    """Return the living instances of a class and its subclasses.

    Those that refer to their class, instead of all that `gc.get_objects()` lists: while someone
    holds that list, a tuple that another thread is filling has one reference too many, and that
    thread gets a SystemError. vLLM freezes its heap once an engine is up, which hides it from both.
    """
    classes = [cls]
    for known in classes:
        children: list[type] = known.__subclasses__()
        classes += [child for child in children if child not in classes]
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        referrers = gc.get_referrers(*classes)
    finally:
        if frozen:
            gc.freeze()
    # By type(): asking a proxy for its __class__, as isinstance does, may import what it stands
    # for or raise.
    return [found for found in referrers if issubclass(type(found), cls)]


class EngineWatch:
    """Calls back whenever a worker is created in this process.

    Args:
        started: Called with the engine. What it raises is logged and goes no further, except
            `NotApplicableError`, by which it refuses to let the engine start.
    """

    def __init__(self, started: Callable[[Engine], None]) -> None:
        self._started = started
        self._armed = False
        self._handle: Any = None

    @staticmethod
    def unmet() -> str | None:
        """Return why engines cannot be seen in the installed vLLM; None if they can."""
        return None if locate(TARGET) else f"this vLLM has no {TARGET}: engines cannot be checked"

    def arm(self) -> None:
        """Watch from now on; engines that already run are reported once."""
        if self._armed:
            return
        self._armed = True
        when_imported(TARGET.module, self._install)

    def disarm(self) -> None:
        """Take the wrapper out again; where someone else's covers it, it stays and does nothing."""
        self._armed = False
        module = imported(TARGET.module)
        if self._handle is None or module is None:
            return
        try:
            out = wrapt.unwrap_object(module, TARGET.qualname, self._handle, missing_ok=True)
        except (wrapt.WrapperNotOutermostError, wrapt.WrapperChainTooDeepError) as error:
            logger.debug("ascend_opt: the watch on engines stays in place: %s", error)
        else:
            self._handle = self._handle if out is None else None

    def _install(self, module: ModuleType) -> None:
        here = reaches(vars(module.WorkerBase).get("__init__"), self._handle)
        if not self._armed or (self._handle is not None and here):
            return
        # Right after the import there can be none.
        workers = _instances(module.WorkerBase) if is_complete(module) else []
        self._handle = wrapt.wrap_function_wrapper(module, TARGET.qualname, self._after_init)
        for worker in workers:
            self._report(worker, running=True)

    def _after_init(self, wrapped: Any, worker: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        if self._armed:
            self._report(worker, running=False)

    def _report(self, worker: Any, running: bool) -> None:
        try:
            rank = getattr(worker, "rank", None)
            self._started(Engine(worker.vllm_config, rank, running, weakref.ref(worker)))
        except NotApplicableError:
            raise
        except Exception:
            logger.exception("ascend_opt: could not check the engine; it goes on")
