"""Switching passes on and off in this process: the public functions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ascend_opt import config as configuration
from ascend_opt import registry
from ascend_opt.base import Pass
from ascend_opt.controller import Controller
from ascend_opt.states import Explanation, PassStatus

_controller = Controller()
read_environment = _controller.read_environment
graph_fingerprint = _controller.graph_fingerprint
requests = _controller.requests


def enable(name: str, **parameters: Any) -> PassStatus:
    """Switch a pass on in this process and in the processes that it starts.

    Imports nothing of vLLM: the pass is applied when its targets are imported, and checked
    against the engine's configuration when a worker starts. Calling it again changes the
    parameters or does nothing.

    Args:
        name: The pass.
        parameters: Over the pass's defaults. `mode="shadow"` has the pass's work compared with the
            original's instead of used; `allow_unknown=True` patches unrecognised sources.

    Returns:
        Its state, with the reason.

    Raises:
        UnknownPassError: No such pass.
        ParameterError: No such parameter, a value that it does not take, or no shadow mode.
        NotApplicableError: The pass cannot be on here, and why.
        RevertError: Other parameters were on, and are covered by someone else's patch.
    """
    return _controller.enable(name, parameters)


def disable(name: str) -> PassStatus:
    """Switch a pass off and give every target its original object back.

    Raises:
        UnknownPassError: No such pass.
        RevertError: Someone put another patch on top; nothing was changed.
    """
    return _controller.disable(name)


@contextlib.contextmanager
def enabled(name: str, **parameters: Any) -> Iterator[PassStatus]:
    """Switch a pass on for the body of a `with`, then back to how it was before."""
    _controller.read_environment()
    before = _controller.requests().get(name)
    status = enable(name, **parameters)
    try:
        yield status
    finally:
        if before is None:
            disable(name)
        else:
            enable(name, **before.as_plain())


def status() -> list[PassStatus]:
    """Return the state of every installed pass in this process, by name."""
    return _controller.status()


def explain(name: str) -> Explanation:
    """Return everything there is to know about a pass here.

    Raises:
        UnknownPassError: No such pass.
    """
    return _controller.explain(name)


def load_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> list[PassStatus]:
    """Switch on the passes of a YAML file or of a mapping of the same form.

    All of it is checked before anything is switched on. A pass that cannot apply is left out
    with a warning or, under `policy: strict`, an error.

    Returns:
        The state of each pass in the configuration.

    Raises:
        ConfigError: It cannot be read or does not follow the schema; names the place.
        NotApplicableError: The policy is strict and a pass cannot apply; nothing was changed.
    """
    classes = registry.discover().classes()
    if isinstance(source, Mapping):
        config = configuration.from_mapping(source, classes)
    else:
        config = configuration.from_file(source, classes)
    return _controller.load_and_export(config)


def available() -> list[type[Pass]]:
    """Return the classes of all installed passes, by name."""
    return list(registry.discover().classes().values())


def reset() -> None:
    """Switch everything off and forget it, as if the library had just been imported."""
    _controller.reset()
