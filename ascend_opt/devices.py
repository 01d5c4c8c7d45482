"""Prefetch backends: how a weight is brought into a device's cache, ahead of its use.

A backend is asked from inside a custom op, in the middle of a model's forward pass and perhaps of
a graph capture: it must not synchronise or copy to the host, and allocates only in `prepare`.
torch is imported when a backend is first used, not with this module.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, ClassVar, Protocol


class PrefetchBackend(Protocol):
    """What a device must offer. Registered in `BACKENDS` under its name.

    Attributes:
        default_where: `graph`, `eager` or `both`: where prefetching pays on this device.
    """

    default_where: ClassVar[str]

    @classmethod
    def unmet(cls) -> str | None:
        """Return why the backend cannot work in this installation; None if it can."""

    def prepare(self) -> None:
        """Make what `prefetch` needs; called before it, and never while a graph is captured."""

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""

    def refusal(self, weight: Any, trigger: Any) -> str | None:
        """Return why this weight cannot be prefetched, as a short phrase; None if it can.

        Args:
            weight: A tensor, or None where the layer has none.
            trigger: The tensor on the device that is ready when the prefetch may begin.
        """

    def prefetch(self, weight: Any, trigger: Any, max_bytes: int) -> int:
        """Start to bring a weight into the cache, once `trigger` is computed.

        Args:
            weight: A tensor that `refusal` accepts.
            trigger: See `refusal`.
            max_bytes: Upper limit.

        Returns:
            The bytes that were asked for.
        """

    def close(self) -> None:
        """Take back what `prepare` changed outside the backend."""


def unsuitable(weight: Any, trigger: Any) -> str | None:
    """Return why a weight is no plain tensor on the trigger's device; None if it is one."""
    if weight is None:
        return "no plain weight tensor"
    if weight.device != trigger.device:
        return f"on {weight.device.type}, not on {trigger.device.type}"
    return None


def extent(weight: Any) -> int:
    """Return how many bytes from a weight's first element on belong to it."""
    stored = weight.untyped_storage().nbytes() - weight.storage_offset() * weight.element_size()
    return int(min(weight.nbytes, stored))


class RecordBackend:
    """Prefetches nothing, on any device: for trying gates and counting what would be done.

    A weight that the CPU platform re-packed and emptied counts with `max_bytes`.
    """

    default_where: ClassVar[str] = "both"

    @classmethod
    def unmet(cls) -> str | None:
        """See `PrefetchBackend.unmet`."""
        return None

    def prepare(self) -> None:
        """See `PrefetchBackend.prepare`."""

    def capturing(self) -> bool:
        """See `PrefetchBackend.capturing`."""
        import torch

        device = torch.accelerator.current_accelerator()
        module = getattr(torch, device.type, None) if device is not None else None
        asks = getattr(module, "is_current_stream_capturing", None)
        return bool(asks()) if asks is not None else False

    def refusal(self, weight: Any, trigger: Any) -> str | None:
        """See `PrefetchBackend.refusal`."""
        return unsuitable(weight, trigger)

    def prefetch(self, weight: Any, trigger: Any, max_bytes: int) -> int:
        """See `PrefetchBackend.prefetch`."""
        return min(max_bytes, extent(weight)) if weight.numel() else max_bytes

    def close(self) -> None:
        """See `PrefetchBackend.close`."""


class NpuBackend:
    """`torch_npu.npu_prefetch` on one side stream for the whole process.

    The side stream waits for the trigger by an event. Outside a capture nothing waits for the
    side stream, since a prefetch is a hint. A capture cannot end while a stream that it forked
    is not joined, so `NPUGraph.capture_end` joins first: that place sees whole graphs and the
    pieces of a piecewise one alike, where a wrapper around the model's forward misses the pieces.

    Prefetching outside a capture is dear: the eager call waits on the host until torch_npu's task
    queue is empty.
    """

    default_where: ClassVar[str] = "graph"

    # Streams and events are scarce on the device (vllm-ascend #9596, #1168), so: one stream.
    _side: ClassVar[Any] = None

    def __init__(self) -> None:
        # Events recorded in the capture that is under way; the graph keeps them afterwards.
        self._events: list[Any] = []
        self._joined: Any = None  # recorded at its end, and made in time: making one can fail
        self._closing = False
        self._graph_class: Any = None
        self._original: Any = None
        self._joining: Any = None

    @classmethod
    def unmet(cls) -> str | None:
        """See `PrefetchBackend.unmet`."""
        if importlib.util.find_spec("torch_npu") is None:
            return (
                "backend=npu, but torch_npu is not installed "
                "(backend=record counts on any device, without prefetching)"
            )
        return None

    def prepare(self) -> None:
        """See `PrefetchBackend.prepare`."""
        import torch

        self._closing = False
        if self._joining is not None:
            return
        if NpuBackend._side is None:
            NpuBackend._side = torch.npu.Stream()
        graph_class = torch.npu.NPUGraph
        original = vars(graph_class)["capture_end"]

        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._join(graph)
            return original(graph, *args, **kwargs)

        graph_class.capture_end = capture_end
        self._graph_class, self._original, self._joining = graph_class, original, capture_end

    def capturing(self) -> bool:
        """See `PrefetchBackend.capturing`."""
        import torch

        return bool(torch.npu.is_current_stream_capturing())

    def refusal(self, weight: Any, trigger: Any) -> str | None:
        """See `PrefetchBackend.refusal`."""
        reason = unsuitable(weight, trigger)
        if reason is not None:
            return reason
        if trigger.device.type != "npu":
            return f"on {trigger.device.type}, which backend=npu cannot prefetch"
        if weight.numel() == 0 or weight.data_ptr() == 0:
            return "weight without storage"
        if self._joining is None:
            return "a capture began before any other forward pass"
        return None

    def prefetch(self, weight: Any, trigger: Any, max_bytes: int) -> int:
        """See `PrefetchBackend.prefetch`."""
        import torch

        size = min(max_bytes, extent(weight))
        capturing = self.capturing()
        ready = torch.npu.Event()
        if capturing and self._joined is None:
            self._joined = torch.npu.Event()
        ready.record(torch.npu.current_stream())
        if capturing:
            # From the next call on the side stream is part of the capture, which has to be joined
            # whatever fails from there on.
            self._events.append(ready)
        self._side.wait_event(ready)
        with torch.npu.stream(self._side):
            torch.ops.npu.npu_prefetch(weight, trigger, size)
        return size

    def _join(self, graph: Any) -> None:
        if not self._events:
            return
        import torch

        done, self._joined = self._joined, None
        done.record(self._side)
        torch.npu.current_stream().wait_event(done)
        # The captured graph refers to its events for as long as it can be replayed.
        graph.ascend_opt_prefetch_events = (*self._events, done)
        self._events = []
        if self._closing:
            self._take_out()

    def close(self) -> None:
        """See `PrefetchBackend.close`; a capture that is under way is joined first."""
        self._closing = True
        if not self._events:
            self._take_out()

    def _take_out(self) -> None:
        # Under someone else's later wrapper ours stays, and does nothing any more.
        if self._joining is not None and vars(self._graph_class)["capture_end"] is self._joining:
            self._graph_class.capture_end = self._original
            self._joining = None


BACKENDS: dict[str, type[PrefetchBackend]] = {"npu": NpuBackend, "record": RecordBackend}
"""Backends by name. A new device adds a class here and its name to the pass's parameter."""
