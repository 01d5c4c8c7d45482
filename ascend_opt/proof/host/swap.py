"""Passes in and out of a running engine between two steps, and clocks on the methods they patch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import wrapt

from ascend_opt import control
from ascend_opt.proof.timing import Clock
from ascend_opt.targets import Target

SETTLE_S = 0.02
"""In which the process writes its record of passes that have changed, in a thread of its own."""

Passes = Mapping[str, Mapping[str, Any]]
"""Pass name to its parameters and options."""


def switch(passes: Passes) -> None:
    """Have these passes on, and no others.

    What is on with other parameters is switched off first. Going off, a pass leaves the engine as
    upstream expects to find it, so a step may be taken at once.

    Raises:
        AscendOptError: One cannot be on, or cannot be taken out.
    """
    before = control.requests()
    for name, request in before.items():
        if name not in passes or request.as_plain() != dict(passes[name]):
            control.disable(name)
    for name, parameters in passes.items():
        if name not in before or before[name].as_plain() != dict(parameters):
            control.enable(name, **parameters)
    gc.collect(1)  # what switching left behind is not for the next step to clear away
    time.sleep(SETTLE_S)


@contextlib.contextmanager
def clocks(targets: Sequence[str]) -> Iterator[dict[str, Clock]]:
    """Time calls of some targets in the body of a `with`, whatever stands there, patched or not.

    A target that is not there, or is not imported, has no clock.
    """
    placed: list[tuple[Any, str, Any]] = []
    found: dict[str, Clock] = {}
    try:
        for text in targets:
            target = Target.parse(text)
            clock = Clock()
            try:
                module = importlib.import_module(target.module)
                owner, attribute, _ = wrapt.resolve_path(module, target.qualname)
                wrapper = wrapt.wrap_object(owner, attribute, wrapt.FunctionWrapper, (clock.time,))
            except (ImportError, AttributeError):
                continue
            placed.append((owner, attribute, wrapper))
            found[text] = clock
        yield found
    finally:
        for owner, attribute, wrapper in reversed(placed):
            wrapt.unwrap_object(owner, attribute, wrapper)
