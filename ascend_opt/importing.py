"""Running something once a module has been imported, whatever state its import is in now."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType

from wrapt.importer import register_post_import_hook

logger = logging.getLogger("vllm.ascend_opt")

# Modules whose post-import hook has run: their body is done, though importlib still says
# `_initializing` until the hook returns.
_executed: weakref.WeakSet[ModuleType] = weakref.WeakSet()


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call back after `module` was imported; at once if it already is.

    The callback may be called more than once, on any thread; what it raises is logged and goes
    no further, since an exception in an import hook would break the import of the target, and
    its retry would succeed unpatched.

    Args:
        module: Full name; it need not exist.
        callback: Idempotent and quick; runs while the importing thread waits.
    """

    def guarded() -> None:
        try:
            callback()
        except Exception:
            logger.exception("ascend_opt: the import hook of %s failed; the import goes on", module)

    def hook(loaded: ModuleType) -> None:
        # wrapt calls at once, on this thread, for a module that has come up since we looked.
        if not registering or threading.get_ident() != caller:
            _executed.add(loaded)
        if is_complete(loaded):
            guarded()
        else:
            _wait_elsewhere(module, guarded)

    registering, caller = True, threading.get_ident()
    present = sys.modules.get(module)
    if present is None:
        register_post_import_hook(hook, module)
    elif is_complete(present):
        guarded()
    else:
        _wait_elsewhere(module, guarded)
    registering = False


def is_complete(module: ModuleType) -> bool:
    """Return whether a module's body has finished running."""
    spec = getattr(module, "__spec__", None)
    return module in _executed or not getattr(spec, "_initializing", False)


def imported(module: str) -> ModuleType | None:
    """Return a module from `sys.modules` if its import has finished."""
    found = sys.modules.get(module)
    return found if found is not None and is_complete(found) else None


def _wait_elsewhere(module: str, callback: Callable[[], None]) -> None:
    # Half imported, by this thread or another: a hook registered now would never run, and
    # waiting here could deadlock. A thread that holds no lock of ours can wait for it.
    threading.Thread(
        target=_wait_for, args=(module, callback), name="ascend_opt-import", daemon=True
    ).start()


def _wait_for(module: str, callback: Callable[[], None]) -> None:
    try:
        importlib.import_module(module)  # blocks on the module's import lock
    except Exception:
        # The import that we waited for failed. Arm the hook for the next try.
        register_post_import_hook(lambda _: callback(), module)
        return
    callback()
