"""Milliseconds in each host method that a pass patches, measured in the workers.

vLLM mixes `WorkerTimer` into its worker class (`--worker-extension-cls`), and its methods are
called by name in every worker. The wrapper goes on top of whatever stands at the target, patched
or not, so both arms of a comparison pay for it, about 1 us a call.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import wrapt

from ascend_opt.targets import Target


class Clock:
    """Counts calls of a method and sums their time.

    Attributes:
        calls: How many there were.
        seconds: How long they took together.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self._depth = 0

    def time(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Call `wrapped` and take its time; a wrapper for `wrapt`."""
        if self._depth:  # a method that calls itself is one call
            return wrapped(*args, **kwargs)
        self._depth += 1
        begun = time.perf_counter()
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - begun
            self.calls += 1
            self._depth -= 1


_clocks: dict[str, Clock] = {}


class WorkerTimer:
    """Mixed into vLLM's worker class; the names are long because they share its namespace."""

    def ascend_opt_time_targets(self, targets: Sequence[str]) -> list[str]:
        """Time calls of some targets from now on; return those that are not there."""
        missing = []
        for text in targets:
            target = Target.parse(text)
            clock = Clock()
            try:
                importlib.import_module(target.module)
                wrapt.wrap_function_wrapper(target.module, target.qualname, clock.time)
            except (ImportError, AttributeError):
                missing.append(text)
                continue
            _clocks[text] = clock
        return missing

    def ascend_opt_take_times(self) -> dict[str, tuple[int, float]]:
        """Return calls and seconds of each timed target since the last time."""
        found = {text: (clock.calls, clock.seconds) for text, clock in _clocks.items()}
        for clock in _clocks.values():
            clock.calls, clock.seconds = 0, 0.0
        return found
