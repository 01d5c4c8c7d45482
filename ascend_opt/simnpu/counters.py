"""What this process made the simulated driver do: counts, bytes, and marks in the trace.

Inside a program under simnpu::

    from ascend_opt.simnpu import counters

    before = counters.snapshot()
    llm.llm_engine.step()
    step = counters.snapshot() - before
    step["sync_event"], step.bytes["cmo_async"], step.replayed["kernel"]
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class NotSimulatedError(RuntimeError):
    """This process does not run on the simulated driver."""


@dataclass(frozen=True)
class Counters:
    """Counts of driver calls by kind, since the process started or between two snapshots.

    ``counters["sync_event"]`` is ``counters.calls["sync_event"]``. The kinds are
    :func:`kinds`; an unknown one is a KeyError that lists them.

    Attributes:
        calls: Calls that the program made, those made while a graph was captured included.
        bytes: Bytes of those calls.
        replayed: Captured work that graph replays queued again.
        replayed_bytes: Bytes of that work.
        executed: Work that took effect on the simulated device.
    """

    calls: dict[str, int]
    bytes: dict[str, int]
    replayed: dict[str, int]
    replayed_bytes: dict[str, int]
    executed: dict[str, int]

    def __getitem__(self, kind: str) -> int:
        if kind not in self.calls:
            raise KeyError(f"{kind!r} is no kind of driver call; there are {', '.join(self.calls)}")
        return self.calls[kind]

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            *(_minus(now, then) for now, then in zip(self._rows(), earlier._rows(), strict=True))
        )

    def nonzero(self) -> dict[str, int]:
        """Return the calls that happened, for printing."""
        return {kind: n for kind, n in self.calls.items() if n}

    def _rows(self) -> tuple[dict[str, int], ...]:
        return (self.calls, self.bytes, self.replayed, self.replayed_bytes, self.executed)


def kinds() -> tuple[str, ...]:
    """Return the kinds of driver call that are counted."""
    driver = _driver()
    return tuple(driver.simnpu_call_name(i).decode() for i in range(driver.simnpu_call_kinds()))


def snapshot() -> Counters:
    """Return the counters of this process now.

    Raises:
        NotSimulatedError: If the process does not run under ``simnpu run``.
    """
    names = kinds()
    room = (ctypes.c_long * (5 * len(names)))()
    _driver().simnpu_counters(room)
    rows = [room[i : i + len(names)] for i in range(0, len(room), len(names))]
    return Counters(*(dict(zip(names, row, strict=True)) for row in rows))


def mark(text: str) -> None:
    """Name the step that begins here: the trace carries it on every call until the next mark."""
    _driver().simnpu_mark(text.encode())


def trace_to(directory: Path | None) -> None:
    """Trace every driver call of this process into a directory from now on; None stops it.

    :func:`ascend_opt.simnpu.trace.read` reads what is there.
    """
    _driver().simnpu_trace_to(str(directory or "").encode())


def placeholders() -> dict[str, int]:
    """Return the operators that gave zeros for want of a kernel, and how often.

    That is allowed while a compiler traces its patterns, and an error at any other time, so this
    never says anything about a running model.
    """
    from ascend_opt.simnpu import operators

    return dict(operators.PLACEHOLDERS)


def _minus(now: dict[str, int], then: dict[str, int]) -> dict[str, int]:
    return {kind: n - then[kind] for kind, n in now.items()}


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libascendcl.so")
        driver.simnpu_call_name.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise NotSimulatedError(
            "the simulated driver is not loaded in this process; start the program with "
            "`python -m ascend_opt.simnpu run -- ...`"
        ) from error
    return driver
