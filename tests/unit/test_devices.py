from types import SimpleNamespace as Namespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ascend_opt.devices import BACKENDS, NpuBackend, RecordBackend, extent  # noqa: E402


class FakeNpu:
    """The part of `torch.npu` that a prefetch touches; keeps what happens, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current: Any = "main"
        self.capturing = False
        log, npu = self.log, self

        class Stream:
            made = 0

            def __init__(self) -> None:
                Stream.made += 1
                self.name = f"side{Stream.made}"

            def wait_event(self, event: Any) -> None:
                log.append(("wait", self.name, event.number))

        class MainStream:
            name = "main"

            def wait_event(self, event: Any) -> None:
                log.append(("wait", "main", event.number))

        class Event:
            made = 0

            def __init__(self) -> None:
                Event.made += 1
                self.number = Event.made

            def record(self, stream: Any) -> None:
                log.append(("record", stream.name, self.number))

        class NPUGraph:
            def capture_end(self) -> None:
                log.append(("capture_end",))

        class Switch:
            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                npu.current = self.stream

            def __exit__(self, *_: Any) -> None:
                npu.current = main

        main = MainStream()
        self.current = main
        self.Stream, self.Event, self.NPUGraph, self.stream = Stream, Event, NPUGraph, Switch

    def current_stream(self) -> Any:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def npu_prefetch(self, weight: Any, trigger: Any, size: int) -> None:
        self.log.append(("prefetch", self.current.name, weight, trigger, size))


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    fake = FakeNpu()
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setattr(torch.ops, "npu", Namespace(npu_prefetch=fake.npu_prefetch))
    monkeypatch.setattr(NpuBackend, "_side", None)
    return fake


class Weight:
    """What a backend asks of a tensor."""

    def __init__(self, size: int = 64, device: str = "npu", pointer: int = 8) -> None:
        self.nbytes = size
        self.device = Namespace(type=device)
        self._pointer = pointer

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def numel(self) -> int:
        return self.nbytes

    def element_size(self) -> int:
        return 1

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return Namespace(nbytes=lambda: self.nbytes)

    def data_ptr(self) -> int:
        return self._pointer


def prepared() -> NpuBackend:
    backend = NpuBackend()
    backend.prepare()
    return backend


def test_a_prefetch_is_ordered_after_its_trigger(npu):
    """The side stream waits for an event of the current stream, then prefetches; no one waits."""
    backend, weight, trigger = prepared(), Weight(64), Weight()
    assert backend.prefetch(weight, trigger, 48) == 48
    assert npu.log == [
        ("record", "main", 1),
        ("wait", "side1", 1),
        ("prefetch", "side1", weight, trigger, 48),
    ]
    assert npu.current_stream().name == "main"


def test_one_side_stream_serves_the_process(npu):
    """Backends come and go with enable and disable; the stream is made once."""
    for _ in range(3):
        backend = prepared()
        backend.prepare()
        backend.close()
    assert npu.Stream.made == 1


def test_a_capture_joins_the_side_stream_before_it_ends(npu):
    """capture_end first has the current stream wait for the side stream, once for the graph."""
    backend = prepared()
    npu.capturing = True
    for _ in range(2):
        backend.prefetch(Weight(), Weight(), 64)
    npu.log.clear()
    npu.NPUGraph().capture_end()
    assert npu.log == [("record", "side1", 2), ("wait", "main", 2), ("capture_end",)]

    npu.log.clear()
    npu.NPUGraph().capture_end()
    assert npu.log == [("capture_end",)]


def test_a_graph_keeps_the_events_of_its_own_capture(npu):
    """The graph refers to its events until it goes: those of its prefetches and of the join."""
    backend, graphs = prepared(), [npu.NPUGraph(), npu.NPUGraph()]
    npu.capturing = True
    for graph in graphs:
        backend.prefetch(Weight(), Weight(), 64)
        graph.capture_end()
    numbers = [sorted(event.number for event in g.ascend_opt_prefetch_events) for g in graphs]
    assert numbers == [[1, 2], [3, 4]]


def test_a_capture_is_joined_even_if_its_prefetch_failed(npu, monkeypatch):
    """The side stream is part of the capture by then, and one that is not joined cannot end."""
    backend = prepared()
    npu.capturing = True
    monkeypatch.setattr(torch.ops, "npu", Namespace())
    with pytest.raises(AttributeError):
        backend.prefetch(Weight(), Weight(), 64)
    npu.log.clear()
    npu.NPUGraph().capture_end()
    assert [entry[:2] for entry in npu.log] == [
        ("record", "side1"),
        ("wait", "main"),
        ("capture_end",),
    ]


def test_a_backend_that_is_closed_during_a_capture_joins_it_first(npu):
    """A pass that goes off in the middle: this capture is joined, then the original is back."""
    original = npu.NPUGraph.capture_end
    backend = prepared()
    npu.capturing = True
    backend.prefetch(Weight(), Weight(), 64)
    backend.close()
    npu.log.clear()
    npu.NPUGraph().capture_end()
    assert [entry[0] for entry in npu.log] == ["record", "wait", "capture_end"]
    assert npu.NPUGraph.capture_end is original


def test_a_graph_class_of_its_own_is_joined_too(npu):
    """A subclass that overrides capture_end and calls its base, as vllm-ascend's does."""
    backend = prepared()

    class Updatable(npu.NPUGraph):
        def capture_end(self) -> None:
            super().capture_end()

    npu.capturing = True
    backend.prefetch(Weight(), Weight(), 64)
    npu.log.clear()
    Updatable().capture_end()
    assert [entry[0] for entry in npu.log] == ["record", "wait", "capture_end"]


def test_eager_prefetches_are_not_joined_by_a_later_capture(npu):
    """Only what was recorded inside a capture belongs to it."""
    backend = prepared()
    backend.prefetch(Weight(), Weight(), 64)
    npu.log.clear()
    npu.NPUGraph().capture_end()
    assert npu.log == [("capture_end",)]


def test_close_gives_capture_end_back(npu):
    """After close the graph class has its own function again, and prepare wraps it once more."""
    original = vars(npu.NPUGraph)["capture_end"]
    backend = prepared()
    assert vars(npu.NPUGraph)["capture_end"] is not original
    backend.close()
    assert vars(npu.NPUGraph)["capture_end"] is original
    backend.close()
    backend.prepare()
    assert vars(npu.NPUGraph)["capture_end"] is not original


def test_close_leaves_a_later_wrapper_alone(npu):
    """Someone wrapped ours: theirs stays in place and still ends the capture."""
    backend = prepared()
    ours = vars(npu.NPUGraph)["capture_end"]

    def theirs(graph: Any) -> None:
        npu.log.append(("theirs",))
        ours(graph)

    npu.NPUGraph.capture_end = theirs
    backend.close()
    npu.NPUGraph().capture_end()
    assert npu.log == [("theirs",), ("capture_end",)]


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (None, "no plain weight tensor"),
        (Weight(device="cpu"), "on cpu, not on npu"),
        (Weight(device="meta"), "on meta, not on npu"),
        (Weight(size=0), "weight without storage"),
        (Weight(pointer=0), "weight without storage"),
        (Weight(), None),
    ],
)
def test_npu_takes_plain_tensors_on_its_device_only(weight, reason, npu):
    """Everything else is refused with a phrase that says what it is."""
    trigger = Weight()
    if weight is not None and weight.device.type == "npu":
        weight.device = trigger.device
    assert prepared().refusal(weight, trigger) == reason


def test_npu_refuses_another_device(npu):
    """Activations that are not on an NPU cannot trigger this backend."""
    weight = Weight(device="cpu")
    assert "cannot prefetch" in (prepared().refusal(weight, weight) or "")


def test_nothing_is_made_inside_a_capture(npu):
    """A capture that comes before any preparation is left alone, with a reason."""
    weight = Weight()
    assert "capture began" in (NpuBackend().refusal(weight, weight) or "")
    assert npu.Stream.made == 0


def test_a_slice_ends_where_its_storage_ends():
    """Bytes are counted from the first element on, and never past the storage."""
    storage = torch.zeros(100)
    assert extent(storage[:10]) == 40
    assert extent(torch.zeros(10).expand(50, 10)) == 40
    assert extent(torch.zeros(20)[15:].expand(50, 5)) == 20


@pytest.mark.parametrize(
    ("weight", "expected"), [(torch.zeros(10), 40), (torch.zeros(100), 64), (torch.zeros(0), 64)]
)
def test_record_counts_what_would_be_prefetched(weight, expected):
    """As many bytes as the weight has, the limit at most; an emptied weight counts in full."""
    backend = RecordBackend()
    assert backend.refusal(weight, torch.zeros(1)) is None
    assert backend.prefetch(weight, torch.zeros(1), 64) == expected
    assert not backend.capturing()


def test_every_backend_says_where_it_pays():
    """Each registered backend can be made without its device and has a default place."""
    assert {name: cls().default_where for name, cls in BACKENDS.items()} == {
        "npu": "graph",
        "record": "both",
    }
