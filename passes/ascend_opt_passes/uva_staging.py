"""uva-staging: tables that the host writes reach the device in one asynchronous copy, if any.

What upstream does. vLLM's Model Runner V2 keeps small tables of all requests (temperature, top-k,
seeds, penalties, lengths, numbers of blocks) in pinned memory that the device reads directly (UVA).
In every step some 16 of them are written whole, each into the next of its pool's two buffers:
`UvaBufferPool.copy_to_uva` does `buffer.np[:n] = x` and reads `buffer.uva`. Ascend has no UVA, so
vllm-ascend replaces the buffer by `UvaBufferWrapper`: a pinned tensor, a device tensor, and a view
of the pinned one whose `__setitem__` calls back for each *row* that is written. The rows are
gathered in a set, and sorted and copied when `uva` is read. Up to 0.26.0rc1 that is an indexed
copy, which blocks: 15 blocking copies and 30 stream synchronisations in every decode step. From
0.27.1rc1 on it is asynchronous where the rows are the first ones; what is left is the bookkeeping,
which grows with max_num_seqs.

What this pass does. A write of the first n rows is copied when it is written, in one asynchronous
copy of n rows, and marks nothing, so the reader finds nothing to do. If the rows held the same
bytes before, nothing is copied: in steady decode that is nearly always so. Any other write (one
row, rows from the middle, an index array, a buffer on which rows are marked) goes upstream's way.

Why it is right.

- **Same bytes.** Upstream's invariant is that rows without a mark are equal on both sides. It holds
  here as well: what was not marked was copied, from the same pinned rows, on the current stream.
  `copy_to_uva`, through which every pool is written, reads right after it wrote, so that is the
  stream on which upstream would have copied. Nothing but copies writes the device's side (checked
  in vLLM 0.26.0 and 0.30.0: all kernels and in-place operations). 310P's sampler does: refused.
- **No source is overwritten before it was read.** The device reads the pinned rows some time after
  the call. vLLM rotates as many buffers as steps can be in flight, and takes a step's tokens before
  it prepares the step that reuses its buffers. But nothing holds a pool to one write a step, and
  nobody waits for a step that samples nothing. So each buffer has an event, recorded behind its
  copy; whoever writes the buffer next, in whatever way, first waits for it if it has not happened.
  In steady decode it has: it lies ahead of a forward whose tokens the scheduler has seen.
- **Going off.** Marks are upstream's own and stay what they are. Copies that were issued are waited
  for, since up to 0.26.0rc1 upstream would not.

While a graph is captured, upstream's way: what it records there is none of our business.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from ascend_opt import EngineCondition, Pass, Requires, hookimpl, host_patch
from ascend_opt_passes.conditions import ModelRunnerV2

MODULE = "vllm_ascend.patch.worker.patch_v2.patch_uva"
BUFFER = f"{MODULE}:UvaBufferWrapper"
NUMPY_WRITE = f"{MODULE}:MonitoredNumPyArray.__setitem__"
TORCH_WRITE = f"{MODULE}:MonitoredTorchTensor.__setitem__"


class NoRealUva(EngineCondition):
    """The device does not read pinned memory by itself.

    Asks what the release itself asks; those up to 0.22.1rc1 know no real UVA and ask nothing.
    """

    name = "no-real-uva"
    description = "real UVA is off (PYTORCH_NPU_ALLOC_CONF without pinned_mem_register:True)"

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        available = getattr(sys.modules.get(MODULE), "is_uva_available", None)
        if available is not None and available():
            return "real UVA is on (PYTORCH_NPU_ALLOC_CONF has pinned_mem_register:True)"
        return None


class Not310P(EngineCondition):
    """The worker is not that of Ascend 310P, whose sampler writes the device's side itself."""

    name = "not-310p"
    description = "the device is not an Ascend 310P"

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        worker = str(subject.parallel_config.worker_cls)
        return f"the device is an Ascend 310P (worker {worker})" if "_310p" in worker else None


@dataclass(frozen=True)
class Parameters:
    """Parameters of `uva-staging`.

    Attributes:
        skip_unchanged: Do not copy rows that hold the same bytes already.
    """

    skip_unchanged: bool = True


@dataclass
class _Staged:
    """The copies of one buffer: the event behind the last, and whether it may be under way."""

    event: Any
    in_flight: bool = False


class UvaStaging(Pass):
    """Stage per-request tables in one asynchronous copy each, and only where they changed."""

    name = "uva-staging"
    version = "1"
    origin = "written for this collection; upstream's own first half is in vllm-ascend 0.27.1rc1"
    remove_when = "upstream's stand-in for UVA marks no rows one by one, or Ascend has real UVA"
    Parameters = Parameters
    effect = "held"
    conditions = (Requires("vllm-ascend>=0.18.0"), ModelRunnerV2(), NoRealUva(), Not310P())

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._staged: WeakKeyDictionary[Any, _Staged] = WeakKeyDictionary()

    def applied(self) -> str:
        """See `Pass.applied`."""
        if self.variants.get(BUFFER) == "blocks":
            return "copies what was written asynchronously; this release blocks on each copy"
        return "copies what was written without marking rows, which this release sorts each time"

    @host_patch(
        BUFFER,
        known={
            "16e3674f24d55221": "blocks",  # 0.18.0 to 0.22.1rc1
            "928589212ab978a5": "blocks",  # 0.23.0 to 0.26.0rc1: real UVA where it is asked for
            "1e5948ba5764b7d2": "queues",  # 0.27.1rc1 to 0.29.0rc1: asynchronous first rows
            "0e08e04da971d408": "queues",  # 0.30.0rc1, 0.30.0rc2: `uva` is a method
        },
        leave=frozenset({"blocks", "queues"}),
    )
    def buffer(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Never in place: that the buffer's source is known is what the rest stands on."""
        return wrapped(*args, **kwargs)

    @host_patch(NUMPY_WRITE, known={"ff9bac24e854f39b": "marks"})  # 0.18.0 to 0.30.0rc2
    def write_array(self, wrapped: Any, view: Any, args: Any, kwargs: Any) -> None:
        """Write through `buffer.np`."""
        self._write(wrapped, view, view._array, *args, **kwargs)

    @host_patch(TORCH_WRITE, known={"c137845c91a3bba5": "marks"})  # 0.18.0 to 0.30.0rc2
    def write_tensor(self, wrapped: Any, view: Any, args: Any, kwargs: Any) -> None:
        """Write through `buffer.cpu`."""
        self._write(wrapped, view, view._tensor, *args, **kwargs)

    def _write(self, wrapped: Any, view: Any, target: Any, key: Any, value: Any) -> None:
        """Write `value` to the rows `key` of a buffer, and see that the device gets them."""
        counters = self.counters
        counters["steps"] += 1
        if self._npu.is_current_stream_capturing():
            self._leave(wrapped, key, value)
            return
        buffer = view._callback.__self__
        staged = self._staged.get(buffer)
        if staged is not None and staged.in_flight:
            self._wait_for(staged)
        num_rows = _first_rows(key, len(target))
        if num_rows is None or buffer._modified_indices:
            self._leave(wrapped, key, value)
            return
        rows = buffer._np[:num_rows]
        before = rows.tobytes()
        try:
            target[key] = value
        except Exception:
            buffer._modified_indices.update(range(num_rows))  # half written, perhaps
            self._leave(wrapped, key, value)  # raises what upstream raises
            return
        counters["held"] += 1
        if self.parameters.skip_unchanged and rows.tobytes() == before:
            counters["unchanged"] += 1
            return
        if staged is None:
            staged = self._staged[buffer] = _Staged(self._npu.Event())
        staged.in_flight = True
        buffer._uva[:num_rows].copy_(buffer._cpu[:num_rows], non_blocking=True)
        staged.event.record()
        counters["copies"] += 1
        counters["rows_copied"] += num_rows
        counters["bytes_copied"] += len(before)

    def _leave(self, wrapped: Any, key: Any, value: Any) -> None:
        """Write upstream's way: mark the rows, to be copied when they are read."""
        self.counters["upstream"] += 1
        wrapped(key, value)

    def _wait_for(self, staged: _Staged) -> None:
        """Make sure that the device has read the buffer's pinned rows."""
        if not staged.event.query():
            staged.event.synchronize()
            self.counters["waits"] += 1
        staged.in_flight = False

    @cached_property
    def _npu(self) -> Any:
        import torch

        return torch.npu

    def fail(self, reason: str) -> None:
        """See `Pass.fail`; upstream's writes, which take over at once, wait for no copy of ours."""
        super().fail(reason)
        self.reverted()

    def reverted(self) -> None:
        """Wait for the copies that were issued."""
        # By device, not by event: a copy that failed half way has recorded none.
        devices = {
            buffer._uva.device for buffer, staged in self._staged.items() if staged.in_flight
        }
        self._staged.clear()
        for device in devices:
            self._npu.synchronize(device)


@hookimpl
def ascend_opt_passes() -> list[type[Pass]]:
    """Register the pass."""
    return [UvaStaging]


def _first_rows(key: Any, num_rows: int) -> int | None:
    """Return n where `key` is the slice of the first n rows, else None."""
    if type(key) is not slice:
        return None
    start, stop, step = key.indices(num_rows)
    return stop if start == 0 and step == 1 else None
