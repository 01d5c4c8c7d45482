"""Record files: what each live process says of its passes, for `ascend_opt status` to read.

One JSON file for each process in a directory that only its user can read, replaced atomically.
A background thread writes it while something changes, so counting costs a step nothing but an
addition. A full disk or a read-only directory costs the records, never the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_opt.errors import RecordsError
from ascend_opt.states import Mode, PassStatus, State, TargetStatus

logger = logging.getLogger("vllm.ascend_opt")

ENVIRONMENT = "VLLM_ASCEND_OPT_RUN_DIR"
INTERVAL_S = 1.0
MAX_CHARACTERS = 1 << 20
_SUFFIX = ".json"
_HALF_WRITTEN = re.compile(r"\.(\d{1,10})\.json\..*")
_RAY_WORKER = "default_worker.py"
"""The program of every worker process of Ray, which is nobody's child by multiprocessing."""


@dataclass(frozen=True)
class Process:
    """Who writes a record.

    Attributes:
        pid: Process id.
        started: The process's start time in clock ticks since boot; tells a reused pid apart.
        parent: Parent's process id.
        role: `main`, `EngineCore`, `VllmWorker-0`, …: what vLLM calls the process; `RayWorker`.
        rank: Rank of the worker in this process among those of its engine, or None.
        replica: Which of the data-parallel engines that worker belongs to; 0 if there is one.
    """

    pid: int
    started: int
    parent: int
    role: str
    rank: int | None
    replica: int | None


@dataclass(frozen=True)
class Record:
    """One process's record.

    Attributes:
        process: The writer.
        updated: Seconds since the epoch.
        passes: Every pass that was ever asked for in that process.
    """

    process: Process
    updated: float
    passes: tuple[PassStatus, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **vars(self.process),
            "updated": self.updated,
            "passes": [status.as_dict() for status in self.passes],
        }


def run_directory() -> Path:
    """Return the directory of the record files; it may not exist yet."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "ascend_opt"
    return Path(tempfile.gettempdir()) / f"ascend_opt-{os.getuid()}"


def make_private(directory: Path) -> None:
    """Make sure that the directory is ours alone.

    One that exists already is left as it is: its mode may be somebody's choice, and the records
    in it are private files in any case.

    Raises:
        OSError: It cannot be made, or belongs to someone else, or others may write to it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user or is no directory")
    if found.st_mode & 0o022:
        raise PermissionError(
            f"others may write to {directory} (mode {stat.S_IMODE(found.st_mode):04o})"
        )


def started_at(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks since boot; None if there is none."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def parent_of(pid: int) -> int | None:
    """Return the process id of a process's parent; None if there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def _stat_fields(pid: int) -> list[str]:
    """Return what Linux says of a process, from its state on; nothing if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The second field is the command in parentheses, which may contain anything.
    return text.rpartition(")")[2].split()


class Reporter:
    """Writes this process's record while there is something to say.

    Args:
        snapshot: Returns the statuses to write, and rank and replica of the worker here.
        tick: Called before each write; looks after what may have changed by itself.
    """

    def __init__(
        self,
        snapshot: Callable[[], tuple[Iterable[PassStatus], int | None, int | None]],
        tick: Callable[[], None],
    ) -> None:
        self._snapshot = snapshot
        self._tick = tick
        self._lock = threading.Lock()  # never taken while the snapshot is
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._last: object = None
        self._written: Path | None = None
        self._complained = False
        atexit.register(self.close)

    def start(self) -> None:
        """Start the thread that writes, if it does not run yet."""
        # Without the lock, which a writer on a file system that hangs may hold: callers must not.
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._wake.set()
            return
        with self._lock:
            if self._thread is not thread:
                return  # another caller was faster
            self._thread = threading.Thread(target=self._run, name="ascend_opt-report", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the interpreter is about to end, or threads are used up
                self._thread = None
                logger.debug("ascend_opt: no record of this process: %s", error)

    def after_fork(self) -> None:
        """Begin anew in a child: threads do not survive a fork, the parent's record is not ours.

        The owner calls it, once the locks that the snapshot takes are whole again.
        """
        running, self._thread = self._thread is not None, None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._last = self._written = None
        if running:
            self.start()

    def _run(self) -> None:
        failing = False
        while self._thread is threading.current_thread():
            try:
                self._tick()
                self._write(only_for=threading.current_thread())
                failing = False
            except Exception:
                if not failing:
                    logger.exception("ascend_opt: no new record of this process; passes go on")
                failing = True
            self._wake.wait(INTERVAL_S)
            self._wake.clear()

    def write(self) -> None:
        """Write the record now if anything changed since the last time."""
        self._write(only_for=None)

    def _write(self, only_for: threading.Thread | None) -> None:
        passes, rank, replica = self._snapshot()
        record = Record(_this_process(rank, replica), time.time(), tuple(passes))
        with self._lock:
            # After close() a thread that was about to write must not bring the record back.
            if only_for is None or self._thread is only_for:
                self._replace(record)

    def _replace(self, record: Record) -> None:
        if (record.process, record.passes) == self._last:
            return
        path = run_directory() / f"{record.process.pid}{_SUFFIX}"
        try:
            _replace(path, json.dumps(record.as_dict()))
        except OSError as error:
            if not self._complained:
                logger.warning(
                    "ascend_opt: no record of this process for `ascend_opt status`: %s "
                    "(set %s to a directory that can be written)",
                    error,
                    ENVIRONMENT,
                )
            self._complained = True
            return
        self._complained = False
        self._last, self._written = (record.process, record.passes), path

    def close(self) -> None:
        """Stop writing, and remove this process's record."""
        with self._lock:
            self._thread = None
            self._wake.set()
            written, self._written, self._last = self._written, None, None
        if written is not None:
            with contextlib.suppress(OSError):
                written.unlink()


def _this_process(rank: int | None, replica: int | None) -> Process:
    pid = os.getpid()
    return Process(pid, started_at(pid) or 0, os.getppid(), _role(), rank, replica)


def _role() -> str:
    name = multiprocessing.current_process().name
    if name != "MainProcess":
        return name
    return "RayWorker" if Path(sys.argv[0]).name == _RAY_WORKER else "main"


def _replace(path: Path, text: str) -> None:
    make_private(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_records(directory: Path | None = None) -> list[Record]:
    """Return the records of this user's live processes, and remove what dead ones left.

    Files of other users, processes of other users, and what is not a record, are ignored.

    Raises:
        RecordsError: The directory is not this user's alone, or cannot be read.
    """
    directory = directory or run_directory()
    try:
        _check_private(directory)
        _sweep(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RecordsError(f"{error}; set {ENVIRONMENT} to a directory of yours") from None
    records = []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        record = _read(path)
        if record is None:
            continue
        if started_at(record.process.pid) == record.process.started:
            if _is_ours(record.process.pid):
                records.append(record)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(records, key=lambda record: record.process.pid)


def _sweep(directory: Path) -> None:
    """Remove the half-written files of processes that were killed while they wrote."""
    for name in os.listdir(directory):
        half = _HALF_WRITTEN.fullmatch(name)
        if half is not None and started_at(int(half[1])) is None:
            with contextlib.suppress(OSError):
                (directory / name).unlink()


def _is_ours(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return sys.platform != "linux"
    uids = next((line.split()[1:] for line in text.splitlines() if line.startswith("Uid:")), [])
    return str(os.getuid()) in uids


def _read(path: Path) -> Record | None:
    try:
        data = json.loads(_text_of(path))
        process = Process(**{field.name: data[field.name] for field in dataclasses.fields(Process)})
        if path.name != f"{process.pid}{_SUFFIX}":
            return None
        passes = tuple(_status(item) for item in data["passes"])
        record = Record(process, float(data["updated"]), passes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return record if _is_well_typed(record) else None


def _text_of(path: Path) -> str:
    """Return the text of a file of ours; a pipe does not block it, a link does not lead it away.

    Raises:
        OSError: It is somebody else's, or no plain file, or too long for a record.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is not ours")
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise OSError(f"{path} is too long for a record")
    return text


def _status(data: dict[str, Any]) -> PassStatus:
    targets = tuple(TargetStatus(**target) for target in data["targets"])
    state, mode = State(data["state"]), Mode(data.get("mode", Mode.ACTIVE))
    return PassStatus(**{**data, "state": state, "mode": mode, "targets": targets})


def _is_well_typed(record: Record) -> bool:
    process = record.process
    integers = [process.pid, process.started, process.parent, *(s.pid for s in record.passes)]
    texts = [process.role]
    mappings = []
    for status in record.passes:
        integers += status.counters.values() if isinstance(status.counters, dict) else [None]
        texts += [status.name, status.reason]
        mappings += [status.parameters, status.counters]
        for target in status.targets:
            texts += [target.target, target.note, target.variant or ""]
    return (
        all(type(number) is int for number in integers)
        and all(n is None or type(n) is int for n in (process.rank, process.replica))
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(mapping, dict) for mapping in mappings)
    )


if sys.platform != "linux":  # pragma: no cover - /proc is how a reused pid is told apart

    def started_at(pid: int) -> int | None:
        """Return 0 for a live process: without /proc a reused pid cannot be told apart."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
