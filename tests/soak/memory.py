"""What a server's processes hold, from /proc, and whether it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ascend_opt.reporting import parent_of

MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    """What a tree of processes holds at one moment.

    Attributes:
        seconds: When, since the load began.
        memory: Bytes that are in memory and no file's: anonymous and shared.
        handles: Open file descriptors.
        threads: Threads.
    """

    seconds: float
    memory: int
    handles: int
    threads: int


def held(root: int, seconds: float) -> Held:
    """Return what a process and its descendants hold now."""
    memory = handles = threads = 0
    for pid in tree(root):
        with suppress(OSError):  # it has ended
            fields = _status(pid)
            memory += 1024 * (fields["RssAnon"] + fields["RssShmem"])
            threads += fields["Threads"]
            handles += len(os.listdir(f"/proc/{pid}/fd"))
    return Held(seconds, memory, handles, threads)


def tree(root: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            children.setdefault(parent_of(int(entry)) or 0, []).append(int(entry))
    pending = [root]
    while pending:
        pid = pending.pop()
        yield pid
        pending += children.get(pid, [])


def _status(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text()
    pairs = (line.split() for line in text.splitlines())
    return {p[0].rstrip(":"): int(p[1]) for p in pairs if len(p) > 1 and p[1].isdecimal()}


def slope(samples: Sequence[Held]) -> float:
    """Return by how many bytes a minute the memory grows.

    The median of the slopes of all pairs (Theil and Sen): nearly a third of the samples may be
    anything, so that a buffer which is there at one moment and gone at the next means nothing.
    """
    slopes = [
        (b.memory - a.memory) / (b.seconds - a.seconds)
        for a, b in combinations(samples, 2)
        if b.seconds > a.seconds
    ]
    return 60 * statistics.median(slopes) if slopes else 0.0
