"""Graph capture and replay, seen through the driver's own C interface."""

import ctypes
from collections.abc import Callable

from unit.simnpu.driver_client import D2H, Driver


def capture(driver: Driver, stream: ctypes.c_void_p, body: Callable[[], None]) -> ctypes.c_void_p:
    graph = ctypes.c_void_p()
    assert driver.lib.aclmdlRICaptureBegin(stream, 0) == 0, driver.error()
    body()
    assert driver.lib.aclmdlRICaptureEnd(stream, ctypes.byref(graph)) == 0, driver.error()
    return graph


def test_capturing_runs_nothing_and_every_replay_runs_it_all(late: Driver) -> None:
    """Captured work takes effect at a replay, each time, in order."""
    stream, ran = late.stream(), []

    def body() -> None:
        late.work(stream, lambda: ran.append("a"))
        late.work(stream, lambda: ran.append("b"))

    graph = capture(late, stream, body)
    late.lib.aclrtSynchronizeStream(stream)
    assert ran == []
    for _ in range(2):
        late.lib.aclmdlRIExecuteAsync(graph, stream)
    assert ran == []
    late.lib.aclrtSynchronizeStream(stream)
    assert ran == ["a", "b", "a", "b"]


def test_replayed_copy_is_as_late_as_any_other(late: Driver) -> None:
    """A D2H copy inside a graph lands when the host waits, not when the graph is launched."""
    stream, device, host = late.stream(), late.device().fill(1), late.pinned().fill(0)
    graph = capture(late, stream, lambda: late.copy(host, device, D2H, stream) and None)
    late.lib.aclmdlRIExecuteAsync(graph, stream)
    assert host.value == 0
    late.lib.aclrtSynchronizeStream(stream)
    assert host.value == 1


def fork(driver: Driver, main: ctypes.c_void_p, side: ctypes.c_void_p) -> None:
    event = driver.event()
    driver.lib.aclrtRecordEvent(event, main)
    driver.lib.aclrtStreamWaitEvent(side, event)


def test_side_stream_joins_the_capture_and_is_replayed(late: Driver) -> None:
    """A stream that waits for captured work is captured too, and its work is counted on replay."""
    main, side, device = late.stream(), late.stream(), late.device(64)

    def body() -> None:
        fork(late, main, side)
        late.lib.aclrtCmoAsync(device.at, ctypes.c_size_t(64), 0, side)
        fork(late, side, main)

    before = late.counters()
    graph = capture(late, main, body)
    for _ in range(3):
        late.lib.aclmdlRIExecuteAsync(graph, main)
    late.lib.aclrtSynchronizeStream(main)
    after = late.counters()
    assert after["calls"]["cmo_async"] - before["calls"]["cmo_async"] == 1
    assert after["replayed"]["cmo_async"] - before["replayed"]["cmo_async"] == 3
    assert after["replayed_bytes"]["cmo_async"] - before["replayed_bytes"]["cmo_async"] == 192
    assert after["executed"]["cmo_async"] - before["executed"]["cmo_async"] == 3


def test_missing_wait_inside_a_graph_shows_at_replay(late: Driver) -> None:
    """Work on the captured side stream without a wait in between runs against stale memory."""
    main, side, device, seen = late.stream(), late.stream(), late.device().fill(0), []

    def body() -> None:
        fork(late, main, side)
        late.work(side, lambda: device.fill(5) and None)
        late.work(main, lambda: seen.append(device.value))  # should have waited for the side
        fork(late, side, main)
        late.work(main, lambda: seen.append(device.value))

    graph = capture(late, main, body)
    late.lib.aclmdlRIExecuteAsync(graph, main)
    late.lib.aclrtSynchronizeStream(main)
    assert seen == [0, 5]


def test_unjoined_side_stream_fails_the_capture(late: Driver) -> None:
    """A capture must not end while captured work is waited for by nobody; the error names it."""
    main, side, device, graph = late.stream(), late.stream(), late.device(64), ctypes.c_void_p()
    late.lib.aclmdlRICaptureBegin(main, 0)
    fork(late, main, side)
    late.lib.aclrtCmoAsync(device.at, ctypes.c_size_t(64), 0, side)
    assert late.lib.aclmdlRICaptureEnd(main, ctypes.byref(graph)) != 0
    assert "unjoined work" in late.error()
    assert not late.lib.simnpu_capturing(side)


def test_updated_task_group_applies_to_the_replay_that_waits_for_it(late: Driver) -> None:
    """Parameters replaced between replays: each replay sees its own, even when both are queued."""
    main, updater, word, seen = late.stream(), late.stream(), late.device().fill(0), []
    group = ctypes.c_void_p()

    def body() -> None:
        late.lib.aclrtValueWait(word.at, ctypes.c_uint64(1), 0, main)
        late.lib.aclrtValueWrite(word.at, ctypes.c_uint64(0), 0, main)
        late.lib.aclmdlRICaptureTaskGrpBegin(main)
        late.work(main, lambda: seen.append("captured"))
        late.lib.aclmdlRICaptureTaskGrpEnd(main, ctypes.byref(group))

    graph = capture(late, main, body)
    for step in ("first", "second"):
        late.lib.aclmdlRIExecuteAsync(graph, main)
        late.lib.aclmdlRICaptureTaskUpdateBegin(updater, group)
        late.work(updater, lambda step=step: seen.append(step))
        late.lib.aclmdlRICaptureTaskUpdateEnd(updater)
        late.lib.aclrtValueWrite(word.at, ctypes.c_uint64(1), 0, updater)
    late.lib.aclrtSynchronizeStream(main)
    assert seen == ["first", "second"]


def test_graph_destroyed_while_its_replay_is_queued_still_runs(late: Driver) -> None:
    """Queued work outlives its graph."""
    stream, ran = late.stream(), []
    graph = capture(late, stream, lambda: late.work(stream, lambda: ran.append(1)) and None)
    late.lib.aclmdlRIExecuteAsync(graph, stream)
    late.lib.aclmdlRIDestroy(graph)
    late.lib.aclrtSynchronizeStream(stream)
    assert ran == [1]
