"""Streams as queues, seen through the driver's own C interface."""

import ctypes
import time

from unit.simnpu.driver_client import D2H, H2D, Driver


def test_late_copy_lands_only_when_the_host_waits_for_its_stream(late: Driver) -> None:
    """A D2H copy leaves the host buffer as it was until the stream is synchronised."""
    stream, device, host = late.stream(), late.device().fill(7), late.pinned().fill(1)
    late.copy(host, device, D2H, stream)
    assert host.value == 1
    assert late.lib.aclrtSynchronizeStream(stream) == 0
    assert host.value == 7


def test_waiting_for_another_stream_delivers_nothing_of_this_one(late: Driver) -> None:
    """Synchronising with stream B says nothing about stream A."""
    a, b, device, host = late.stream(), late.stream(), late.device().fill(7), late.pinned().fill(1)
    late.copy(host, device, D2H, a)
    late.work(b, lambda: None)
    late.lib.aclrtSynchronizeStream(b)
    assert host.value == 1
    late.lib.aclrtSynchronizeDevice()
    assert host.value == 7


def test_event_delivers_what_was_queued_before_it_and_nothing_after(late: Driver) -> None:
    """An event is an exact place in its stream."""
    stream, event, ran = late.stream(), late.event(), []
    late.work(stream, lambda: ran.append("before"))
    late.lib.aclrtRecordEvent(event, stream)
    late.work(stream, lambda: ran.append("after"))
    assert late.lib.aclrtSynchronizeEvent(event) == 0
    assert ran == ["before"]
    late.lib.aclrtSynchronizeStream(stream)
    assert ran == ["before", "after"]


def test_work_runs_in_stream_order(late: Driver) -> None:
    """A queue is first in, first out, copies and kernels alike."""
    stream, device, host, seen = late.stream(), late.device().fill(0), late.pinned().fill(5), []
    late.work(stream, lambda: seen.append(device.value))
    late.copy(device, host, H2D, stream)
    late.work(stream, lambda: seen.append(device.value))
    late.lib.aclrtSynchronizeStream(stream)
    assert seen == [0, 5]


def test_stream_wait_runs_the_other_stream_first(late: Driver) -> None:
    """Work behind a wait sees what the awaited stream did before the event."""
    main, side, event, ran = late.stream(), late.stream(), late.event(), []
    late.work(main, lambda: ran.append("main"))
    late.lib.aclrtRecordEvent(event, main)
    late.work(main, lambda: ran.append("main later"))
    late.lib.aclrtStreamWaitEvent(side, event)
    late.work(side, lambda: ran.append("side"))
    late.lib.aclrtSynchronizeStream(side)
    assert ran == ["main", "side"]
    late.lib.aclrtSynchronizeDevice()


def test_missing_stream_wait_reads_stale_device_memory(late: Driver) -> None:
    """Without the wait the side stream computes on what was there before."""
    main, side, device, out = late.stream(), late.stream(), late.device().fill(1), []
    late.work(main, lambda: device.fill(2) and None)
    late.work(side, lambda: out.append(device.value))
    late.lib.aclrtSynchronizeStream(side)
    assert out == [1]
    late.lib.aclrtSynchronizeDevice()


def test_wait_refers_to_the_latest_record_at_the_time_of_the_call(late: Driver) -> None:
    """Recording again after the wait does not move what the wait waits for."""
    main, side, event, ran = late.stream(), late.stream(), late.event(), []
    late.work(main, lambda: ran.append(1))
    late.lib.aclrtRecordEvent(event, main)
    late.lib.aclrtStreamWaitEvent(side, event)
    late.work(main, lambda: ran.append(2))
    late.lib.aclrtRecordEvent(event, main)
    late.lib.aclrtSynchronizeStream(side)
    assert ran == [1]
    late.lib.aclrtSynchronizeEvent(event)
    assert ran == [1, 2]


def test_pinned_source_overwritten_early_delivers_the_overwritten_bytes(late: Driver) -> None:
    """The device reads a pinned source when the copy runs, not when it is queued."""
    stream, device, host = late.stream(), late.device().fill(0), late.pinned().fill(3)
    late.copy(device, host, H2D, stream)
    host.fill(9)
    late.lib.aclrtSynchronizeStream(stream)
    assert device.value == 9


def test_pageable_source_is_taken_at_the_call(late: Driver) -> None:
    """Pageable memory is staged: overwriting it afterwards changes nothing."""
    stream, device, source = late.stream(), late.device(), ctypes.create_string_buffer(b"\3" * 8)
    size = ctypes.c_size_t(8)
    late.lib.aclrtMemcpyAsync(device.at, size, source, size, H2D, stream)
    ctypes.memset(source, 9, 8)
    late.lib.aclrtSynchronizeStream(stream)
    assert device.value == 3


def test_copy_to_pageable_memory_returns_when_it_is_done(late: Driver) -> None:
    """Pageable memory cannot be written later, so such a copy waits for its stream."""
    stream, device, target = late.stream(), late.device().fill(4), ctypes.create_string_buffer(8)
    size = ctypes.c_size_t(8)
    late.lib.aclrtMemcpyAsync(target, size, device.at, size, D2H, stream)
    assert target.raw[0] == 4


def test_blocking_copy_orders_itself_after_nothing(late: Driver) -> None:
    """A blocking copy reads the device as it is; a synchronise before it is the program's duty."""
    stream, device, host = late.stream(), late.device().fill(1), late.pinned()
    late.work(stream, lambda: device.fill(2) and None)
    size = ctypes.c_size_t(8)
    late.lib.aclrtMemcpy(host.at, size, device.at, size, D2H)
    assert host.value == 1
    late.lib.aclrtSynchronizeStream(stream)
    late.lib.aclrtMemcpy(host.at, size, device.at, size, D2H)
    assert host.value == 2


def test_polling_an_event_ends(late: Driver) -> None:
    """A query hurries nothing, yet a program that polls an event sees it complete in the end."""
    stream, event, ran, status = late.stream(), late.event(), [], ctypes.c_int()
    late.work(stream, lambda: ran.append(1))
    late.lib.aclrtRecordEvent(event, stream)
    for _ in range(10):
        late.lib.aclrtQueryEventStatus(event, ctypes.byref(status))
    assert (status.value, ran) == (0, [])
    deadline = time.monotonic() + 10
    while not status.value and time.monotonic() < deadline:
        late.lib.aclrtQueryEventStatus(event, ctypes.byref(status))
        time.sleep(0.001)
    assert (status.value, ran) == (1, [1])


def test_freed_memory_stays_until_the_work_that_names_it_has_run(late: Driver) -> None:
    """Freeing waits for nothing, and nothing queued finds its memory gone."""
    size = 1 << 20
    stream, device, host = late.stream(), late.device(size).fill(6), late.pinned(size).fill(1)
    late.copy(host, device, D2H, stream)
    late.lib.aclrtFree(device.at)
    assert host.value == 1
    late.device(size).fill(9)  # would get the same bytes if they were free
    late.lib.aclrtSynchronizeStream(stream)
    assert host.value == 6


def test_now_delivery_runs_work_at_the_call(now: Driver) -> None:
    """With delivery ``now`` nothing stays queued."""
    stream, device, host = now.stream(), now.device().fill(7), now.pinned().fill(1)
    now.copy(host, device, D2H, stream)
    assert host.value == 7
    assert now.lib.simnpu_pending(stream) == 0


def test_host_wait_that_nothing_can_end_fails_with_the_stream(late: Driver) -> None:
    """A wait for a value that nobody writes is an error that names the stream, not a hang."""
    stream, word = late.stream(), late.device().fill(0)
    late.lib.simnpu_set_patience(100.0)
    late.lib.aclrtValueWait(word.at, ctypes.c_uint64(1), 0, stream)
    assert late.lib.aclrtSynchronizeStream(stream) != 0
    assert "waits for a value" in late.error()
    other = late.stream()
    late.lib.aclrtValueWrite(word.at, ctypes.c_uint64(1), 0, other)
    assert late.lib.aclrtSynchronizeStream(stream) == 0
    late.lib.simnpu_set_patience(60000.0)


def test_value_wait_lets_other_streams_run_no_further_than_it_needs(late: Driver) -> None:
    """The stream that writes the value stops right after the write."""
    main, side, word, ran = late.stream(), late.stream(), late.device().fill(0), []
    late.lib.aclrtValueWait(word.at, ctypes.c_uint64(1), 0, main)
    late.work(main, lambda: ran.append("main"))
    late.lib.aclrtValueWrite(word.at, ctypes.c_uint64(1), 0, side)
    late.work(side, lambda: ran.append("side"))
    late.lib.aclrtSynchronizeStream(main)
    assert ran == ["main"]
    late.lib.aclrtSynchronizeDevice()


def test_deferred_failure_is_returned_by_the_next_host_wait(late: Driver) -> None:
    """An error on the device reaches the host where it next waits, once."""
    stream = late.stream()
    late.work(stream, lambda: late.lib.simnpu_work_failed(b"kernel x broke"))
    assert late.lib.aclrtSynchronizeStream(stream) != 0
    assert late.error() == "kernel x broke"
    assert late.lib.aclrtSynchronizeStream(stream) == 0


def test_counters_count_calls_bytes_and_what_took_effect(late: Driver) -> None:
    """A queued prefetch is a call with its bytes; it is executed only once its stream ran."""
    stream, device, before = late.stream(), late.device(4096), late.counters()
    late.lib.aclrtCmoAsync(device.at, ctypes.c_size_t(4096), 0, stream)
    queued = late.counters()
    late.lib.aclrtSynchronizeStream(stream)
    done = late.counters()
    assert queued["calls"]["cmo_async"] - before["calls"]["cmo_async"] == 1
    assert queued["bytes"]["cmo_async"] - before["bytes"]["cmo_async"] == 4096
    assert queued["executed"]["cmo_async"] == before["executed"]["cmo_async"]
    assert done["executed"]["cmo_async"] - before["executed"]["cmo_async"] == 1


def test_device_memory_has_an_end(late: Driver) -> None:
    """Asking for more than there is fails with the figures and the variable to change."""
    out = ctypes.c_void_p()
    assert late.lib.aclrtMalloc(ctypes.byref(out), ctypes.c_size_t(1 << 40), 0) != 0
    assert "SIMNPU_MEM_GB" in late.error()


def test_aclop_fails_with_its_name(late: Driver) -> None:
    """The old operator interface has no kernels here, and says which one was asked for."""
    assert late.lib.aclopCompileAndExecute(b"Foo") != 0
    assert "Foo" in late.error()
