"""The driver without compute: nothing is queued, nothing large touched, all is counted."""

import ctypes
import mmap
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unit.simnpu.driver_client import D2D, D2H, H2D, Driver
from unit.simnpu.test_driver_graphs import capture

SMALL = 64 << 10


@pytest.fixture
def idle(driver_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver of a device that computes nothing and has 1 TiB of memory."""
    monkeypatch.setenv("SIMNPU_MEM_GB", "1024")
    driver = Driver(driver_directory)
    assert driver.lib.aclrtSynchronizeDevice() == 0
    driver.lib.simnpu_set_compute(0)
    yield driver
    driver.lib.simnpu_set_compute(1)


def test_device_memory_is_address_space_until_it_is_touched(idle: Driver) -> None:
    """A model that is many times the host's memory can be allocated, and freed again."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    weights = idle.device(600 << 30)
    assert weights.at.value % 512 == 0
    idle.lib.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total))
    assert total.value - free.value >= 600 << 30
    idle.lib.aclrtMemsetAsync(weights.at, ctypes.c_size_t(weights.n), 7, weights.at, None)
    assert idle.lib.aclrtFree(weights.at) == 0
    idle.lib.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total))
    assert total.value - free.value < 1 << 30
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    assert grown < 64 << 10  # KiB


def test_everything_is_over_when_its_call_returns(idle: Driver) -> None:
    """A copy has arrived, a record has happened, and no wait finds anything to wait for."""
    stream, event = idle.stream(), idle.event()
    device, host = idle.device().fill(1), idle.pinned().fill(0)
    idle.copy(host, device, D2H, stream)
    assert host.value == 1
    idle.lib.aclrtRecordEvent(event, stream)
    status = ctypes.c_int()
    idle.lib.aclrtQueryEventStatus(event, ctypes.byref(status))
    assert status.value == 1
    word = ctypes.c_uint32(0)  # which nobody is going to write
    value = ctypes.c_uint64(1)
    assert idle.lib.aclrtValueWait(ctypes.byref(word), value, 0, stream) == 0
    assert idle.lib.aclrtSynchronizeDevice() == 0
    assert idle.lib.simnpu_pending(stream) == 0


def test_calls_and_what_took_effect_are_counted_as_with_compute(idle: Driver) -> None:
    """The same program gives the same counters, replays of graphs included."""

    def program() -> dict[str, dict[str, int]]:
        stream, side, event = idle.stream(), idle.stream(), idle.event()
        device, host = idle.device(), idle.pinned()

        def body() -> None:
            idle.work(stream, lambda: None)
            idle.copy(device, host, H2D, stream)
            idle.lib.aclrtRecordEvent(event, stream)
            idle.lib.aclrtStreamWaitEvent(side, event)
            idle.lib.aclrtCmoAsync(device.at, ctypes.c_size_t(8), 0, side)
            idle.lib.aclrtRecordEvent(event, side)
            idle.lib.aclrtStreamWaitEvent(stream, event)

        before = idle.counters()
        body()
        graph = capture(idle, stream, body)
        idle.lib.aclmdlRIExecuteAsync(graph, stream)
        idle.lib.aclrtSynchronizeStream(stream)
        idle.lib.aclrtSynchronizeEvent(event)
        after = idle.counters()
        return {
            row: {kind: n - before[row][kind] for kind, n in kinds.items()}
            for row, kinds in after.items()
        }

    without = program()
    idle.lib.simnpu_set_compute(1)
    full = program()
    assert without["replayed"]["kernel"] == without["replayed"]["cmo_async"] == 1
    # The start of a replay on a second stream is an entry of its own where there are queues.
    for kind in ("record_event", "stream_wait_event"):
        full["executed"][kind] -= 1
    assert without == full


@pytest.mark.parametrize(
    ("size", "arrives"), [(SMALL, True), (SMALL + 1, False)], ids=["small", "large"]
)
def test_only_small_copies_are_written_to_the_device(
    idle: Driver, size: int, arrives: bool
) -> None:
    """What an engine counts with arrives; weights and activations do not. Both are counted."""
    stream = idle.stream()
    source, target, other = idle.pinned(size).fill(3), idle.device(size), idle.device(size)
    before = idle.counters()["bytes"]["memcpy_async_h2d"]
    idle.copy(target, source, H2D, stream)
    assert idle.counters()["bytes"]["memcpy_async_h2d"] - before == size
    assert target.value == (3 if arrives else 0)
    idle.lib.aclrtMemset(other.at, ctypes.c_size_t(size), 5, ctypes.c_size_t(size))
    assert other.value == (5 if arrives else 0)
    idle.copy(target, other, D2D, stream)
    assert target.value == (5 if arrives else 0)


def test_copies_to_the_host_arrive_whatever_their_size(idle: Driver) -> None:
    """The host reads what is there: zeros where nothing was written."""
    size = SMALL + mmap.PAGESIZE
    device, host = idle.device(size), idle.pinned(size).fill(9)
    idle.copy(host, device, D2H, idle.stream())
    assert host.value == 0


def test_captured_copies_take_effect_at_each_replay(idle: Driver) -> None:
    """Capturing keeps work, and a replay does it."""
    stream, device, host = idle.stream(), idle.device().fill(1), idle.pinned().fill(0)
    body: Callable[[], None] = lambda: idle.copy(host, device, D2H, stream) and None  # noqa: E731
    graph = capture(idle, stream, body)
    assert host.value == 0
    for value in (1, 2):
        device.fill(value)
        idle.lib.aclmdlRIExecuteAsync(graph, stream)
        assert host.value == value
