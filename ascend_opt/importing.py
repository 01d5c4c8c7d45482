"""Running something once a module has been imported, whatever state its import is in now."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType

from wrapt.importer import register_post_import_hook

logger = logging.getLogger("vllm.ascend_opt")

Callback = Callable[[ModuleType], None]

_POLL_S = 0.002
_lock = threading.Lock()
_waiting: dict[str, list[Callback]] = {}


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def when_imported(module: str, callback: Callback) -> None:
    """Call back with `module` after it was imported; at once if it already is.

    Asking again for what is already waited for does nothing. What the callback raises is logged
    and goes no further, since an exception in an import hook would break the import of the
    target, and its retry would succeed unpatched.

    Args:
        module: Full name; it need not exist.
        callback: Idempotent and quick; runs on any thread, while the importing thread waits.
    """
    present = imported(module)
    if present is not None:
        _call(module, present, callback)
        return
    with _lock:
        callbacks = _waiting.setdefault(module, [])
        if callback in callbacks:
            return
        callbacks.append(callback)
        if len(callbacks) > 1:
            return  # the hook is there
    _hook(module)


def is_complete(module: ModuleType) -> bool:
    """Return whether a module's body has finished running."""
    spec = getattr(module, "__spec__", None)
    return not getattr(spec, "_initializing", False)


def imported(module: str) -> ModuleType | None:
    """Return a module from `sys.modules` if its import has finished."""
    found = sys.modules.get(module)
    return found if found is not None and is_complete(found) else None


def _hook(module: str) -> None:
    """Have what waits for a module called by the import system."""
    registering = True
    already: list[ModuleType] = []

    def hook(found: ModuleType) -> None:
        # After the module's body, but with `_initializing` still set: do not ask is_complete.
        if registering:
            already.append(found)
        else:
            _fire(module, found)

    register_post_import_hook(hook, module)
    registering = False
    if already:
        # wrapt saw it in sys.modules and called at once, though it may be half built, by this
        # thread or another. Waiting here could deadlock; a thread that holds nothing can wait.
        threading.Thread(
            target=_wait_for, args=(module, already[0]), name="ascend_opt-import", daemon=True
        ).start()


def _wait_for(module: str, found: ModuleType) -> None:
    while not is_complete(found):
        time.sleep(_POLL_S)
    if sys.modules.get(module) is found:
        _fire(module, found)
    else:
        _hook(module)  # that import failed; be there at the next try


def _fire(module: str, found: ModuleType) -> None:
    with _lock:
        callbacks = _waiting.pop(module, [])
    for callback in callbacks:
        _call(module, found, callback)


def _call(module: str, found: ModuleType, callback: Callback) -> None:
    try:
        callback(found)
    except Exception:
        logger.exception("ascend_opt: the import hook of %s failed; the import goes on", module)
