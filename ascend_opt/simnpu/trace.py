"""Turns the driver's trace files into one trace for Perfetto or chrome://tracing.

Every process under ``SIMNPU_TRACE=DIRECTORY`` writes ``PID.jsonl`` there, a line for each driver
call, for each piece of work when it takes effect, and for each step mark.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A trace file cannot be read; the message names the file and line."""


@dataclass(frozen=True)
class Record:
    """One line of a driver trace.

    Attributes:
        kind: ``call`` (the program called the driver), ``run`` (work took effect) or ``mark``.
        call: The kind of driver call, as in :mod:`ascend_opt.simnpu.counters`; empty for a mark.
        pid: The process.
        thread: The calling thread; 0 for ``run``.
        stream: Stream number, or -1 where the call concerns none.
        bytes: Bytes copied, filled or prefetched.
        at: ``file:line`` of the Python code that caused the call, or empty.
        step: The step mark in force, or empty.
        name: Operator of a kernel, text of a mark, or empty.
        captured: Whether the call went into a graph being captured.
        start_ms: When, on the machine's monotonic clock.
        length_ms: How long the work took on this CPU; 0 for calls and marks.
    """

    kind: str
    call: str
    pid: int
    thread: int
    stream: int
    bytes: int
    at: str
    step: str
    name: str
    captured: bool
    start_ms: float
    length_ms: float


def read(directory: Path) -> list[Record]:
    """Return the records of every process that traced into a directory, in order of time.

    Raises:
        TraceError: If a line is not one that the driver writes. A last line cut short, as a killed
            process leaves it, is passed over.
    """
    records = [r for path in sorted(directory.glob("*.jsonl")) for r in _read_process(path)]
    return sorted(records, key=lambda record: record.start_ms)


def to_chrome(records: Iterable[Record]) -> dict[str, Any]:
    """Return the records as a Chrome trace: host threads and streams are tracks of each process."""
    events: list[dict[str, Any]] = []
    tracks: set[tuple[int, int, str]] = set()
    for record in records:
        if record.kind == "run":
            track, name = 1_000_000 + record.stream, f"stream {record.stream}"
        else:
            track, name = record.thread, f"host thread {record.thread}"
        tracks.add((record.pid, track, name))
        detail = {
            "stream": record.stream,
            "bytes": record.bytes,
            "at": record.at,
            "step": record.step,
            "captured": record.captured,
        }
        event = {
            "name": record.name or record.call,
            "cat": record.call or record.kind,
            "pid": record.pid,
            "tid": track,
            "ts": record.start_ms * 1e3,
            "args": {key: value for key, value in detail.items() if value not in ("", False)},
        }
        if record.kind == "run":
            event |= {"ph": "X", "dur": record.length_ms * 1e3}
        else:
            event |= {"ph": "i", "s": "p" if record.kind == "mark" else "t"}
        events.append(event)
    for pid, track, name in sorted(tracks):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": name}}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def export(directory: Path, file: Path) -> int:
    """Write the traces of a directory as one Chrome trace; return the number of records."""
    records = read(directory)
    file.write_text(json.dumps(to_chrome(records)))
    return len(records)


def _read_process(path: Path) -> Iterator[Record]:
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            yield Record(
                kind=fields["k"],
                call=fields.get("c", ""),
                pid=int(path.stem),
                thread=fields.get("tid", 0),
                stream=fields.get("s", -1),
                bytes=fields.get("n", 0),
                at=fields.get("at", ""),
                step=fields.get("step", ""),
                name=fields.get("name", ""),
                captured=bool(fields.get("captured")),
                start_ms=fields["t"],
                length_ms=fields.get("d", 0.0),
            )
        except (json.JSONDecodeError, KeyError) as error:
            if number == len(lines):
                return
            raise TraceError(
                f"{path}:{number}: not a line of a simnpu trace ({error}): {line[:80]!r}"
            ) from error
