"""What the passes of a server did, on the `/metrics` page that vLLM serves.

Only the process that answers HTTP has such a page, and the passes are in others. So at each scrape
it reads the record files of its own server's processes, and keeps nothing but what it takes for
counters never to go backwards.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import wrapt

from ascend_opt.importing import when_imported
from ascend_opt.reporting import Process, Record, parent_of, read_records
from ascend_opt.states import State

logger = logging.getLogger("vllm.ascend_opt")

PREFIX = "ascend_opt_pass"

_VLLM = "vllm.v1.metrics.prometheus"
_REGISTRY = "get_prometheus_registry"
_HELP = {
    "steps": "Steps that the pass saw.",
    "held": "Steps on which the pass's conditions held.",
    "compared": "Calls that shadow mode compared with the original.",
    "differed": "Calls in which shadow mode found a difference.",
}


class PassCollector:
    """A prometheus_client collector of the passes in a tree of processes.

    To serve it from a script, with vLLM's own metrics or without:

        prometheus_client.REGISTRY.register(PassCollector())
        prometheus_client.start_http_server(9000)

    Args:
        root: Process id of the tree's root; this process if left out.
    """

    def __init__(self, root: int | None = None) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._counts: dict[tuple[Any, ...], _Count] = {}
        self._complained = False

    def describe(self) -> list[Any]:
        """Return what tells a registry that a second one of these would say everything twice."""
        return [_state_family()]

    def collect(self) -> list[Any]:
        """Return metric families; none where the records cannot be read, which is logged once."""
        try:
            with self._lock:
                records = _tree(read_records(), self._root or os.getpid())
                return [*_states(records), *self._counters(records)]
        except Exception as error:
            if not self._complained:
                logger.warning("ascend_opt: no metrics of passes: %r", error)
            self._complained = True
            return []

    def _counters(self, records: Iterable[Record]) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for record in records:
            process = record.process
            for status in record.passes:
                for counter, value in status.counters.items():
                    key = (process.pid, process.started, status.name, counter)
                    count = self._counts.setdefault(key, _Count())
                    count.take(value)
                    count.labels = {"pass": status.name, **_place(process)}
        # Dead processes too: what they did was done.
        totals: dict[str, Counter[tuple[tuple[str, str], ...]]] = {}
        helps: dict[str, str] = {}
        for (*_, counter), count in self._counts.items():
            name, reason = family_of(counter)
            labels = {**count.labels, "reason": reason} if reason else count.labels
            totals.setdefault(name, Counter())[tuple(labels.items())] += count.total
            helps.setdefault(name, _help(counter))
        for name, series in sorted(totals.items()):
            family = CounterMetricFamily(name, helps[name])
            for pairs, total in series.items():
                family.add_sample(f"{name}_total", dict(pairs), total)
            yield family


class _Count:
    """One counter of one process; it begins at 0 again if the pass is enabled anew."""

    def __init__(self) -> None:
        self.labels: Mapping[str, str] = {}
        self._last = self._before = 0

    def take(self, value: int) -> None:
        if value < self._last:
            self._before += self._last
        self._last = value

    @property
    def total(self) -> int:
        return self._before + self._last


def family_of(counter: str) -> tuple[str, str]:
    """Return the metric of a pass's counter, without `_total`, and the reason it ends with.

    `waits_elided` is `ascend_opt_pass_waits_elided`; a unit goes last, as Prometheus wants it, so
    `bytes_prefetched` is `ascend_opt_pass_prefetched_bytes`; and of `skipped: no storage` the
    second half is a label.
    """
    head, _, reason = counter.partition(":")
    name = re.sub(r"[^a-z0-9]+", "_", head.lower()).strip("_").removesuffix("_total")
    if name.startswith("bytes_"):
        name = f"{name.removeprefix('bytes_')}_bytes"
    return f"{PREFIX}_{name}", reason.strip()


def _help(counter: str) -> str:
    name = counter.partition(":")[0]
    return _HELP.get(name, f"What passes count as {name}; see the page of the pass.")


def _state_family() -> Any:
    from prometheus_client.core import GaugeMetricFamily

    choices = ", ".join(State)
    return GaugeMetricFamily(
        f"{PREFIX}_state",
        f"1 for the state that a pass has in a live process ({choices}).",
        labels=("pass", "state", "mode", "role", "engine", "rank", "pid"),
    )


def _states(records: Iterable[Record]) -> Iterator[Any]:
    family = _state_family()
    for record in records:
        process = record.process
        for status in record.passes:
            where = (*_place(process).values(), str(process.pid))
            family.add_metric((status.name, str(status.state), str(status.mode), *where), 1)
    if family.samples:
        yield family


def _place(process: Process) -> dict[str, str]:
    """Return the labels that tell workers apart; `engine` is the data-parallel one."""
    engine, rank = process.replica, process.rank
    return {
        "role": process.role,
        "engine": "" if engine is None else str(engine),
        "rank": "" if rank is None else str(rank),
    }


def _tree(records: list[Record], root: int) -> list[Record]:
    """Return the records of a process and of its descendants."""
    parents = {record.process.pid: record.process.parent for record in records}
    return [record for record in records if root in _line(record.process.pid, parents)]


def _line(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """Yield a process and its ancestors, as far up as they are known."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        yield pid
        pid = parents.get(pid) or parent_of(pid) or 0  # one without passes, such as a forkserver


def join_vllm() -> None:
    """Have the passes on the page of metrics in whichever process vLLM serves one."""
    try:
        when_imported(_VLLM, _watch)
    except Exception as error:
        logger.warning("ascend_opt: no metrics of passes: %r", error)


def _watch(module: ModuleType) -> None:
    if not hasattr(module, _REGISTRY):
        logger.info("ascend_opt: no metrics of passes: %s has no %s", _VLLM, _REGISTRY)
        return
    if not isinstance(vars(module)[_REGISTRY], wrapt.FunctionWrapper):
        wrapt.wrap_function_wrapper(module, _REGISTRY, _joined)


def _joined(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Return the registry that vLLM is about to serve, with a collector of ours in it."""
    registry = wrapped(*args, **kwargs)
    try:
        _join(registry)
    except Exception as error:
        logger.warning("ascend_opt: no metrics of passes: %r", error)
    return registry


def _join(registry: Any) -> None:
    from prometheus_client import REGISTRY, multiprocess

    kind = multiprocess.MultiProcessCollector
    if registry is REGISTRY:
        if not any(type(found) is PassCollector for found in list(registry._collector_to_names)):
            registry.register(PassCollector())
    elif not isinstance(vars(kind)["collect"], wrapt.FunctionWrapper):
        # One of several API servers. Each scrape is answered from a registry of its own, made by
        # whatever answers, so what they have in common is this class. The engine belongs to the
        # process that started them all.
        launcher = multiprocessing.parent_process()
        collector = PassCollector(launcher.pid if launcher else None)

        def collect(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            return itertools.chain(wrapped(*args, **kwargs), collector.collect())

        wrapt.wrap_function_wrapper(multiprocess, f"{kind.__name__}.collect", collect)
