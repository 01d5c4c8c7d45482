import ctypes
import json
from pathlib import Path

import pytest
from unit.simnpu.driver_client import D2H, Driver

from ascend_opt.simnpu import trace


@pytest.fixture
def traced(late: Driver, tmp_path: Path):
    """A driver that traces into tmp_path."""
    late.lib.simnpu_trace_to(str(tmp_path).encode())
    yield late
    late.lib.simnpu_trace_to(b"")


def test_call_and_its_effect_are_two_records(traced: Driver, tmp_path: Path) -> None:
    """The trace has the call when it was made, and the copy when it took effect."""
    stream, device, host = traced.stream(), traced.device(64), traced.pinned(64)
    traced.lib.simnpu_mark(b"step 1")
    traced.copy(host, device, D2H, stream)
    traced.lib.aclrtSynchronizeStream(stream)
    mark, call, wait, run = sorted(
        trace.read(tmp_path), key=lambda r: ["mark", "call", "run"].index(r.kind)
    )
    assert (mark.kind, mark.name) == ("mark", "step 1")
    assert (call.call, call.bytes, call.step) == ("memcpy_async_d2h", 64, "step 1")
    assert (wait.call, wait.stream) == ("sync_stream", call.stream)
    assert (run.kind, run.call, run.bytes) == ("run", "memcpy_async_d2h", 64)
    assert run.start_ms >= call.start_ms
    assert call.thread != 0


def test_where_comes_from_the_hook(traced: Driver, tmp_path: Path) -> None:
    """A call carries the place that the operator library names."""

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t)
    def where(room, size):
        text = b'model.py:12 "quoted"\0'
        ctypes.memmove(room, text, len(text))
        return 1

    traced.lib.simnpu_set_where(where)
    traced.lib.aclrtSynchronizeDevice()
    traced.lib.simnpu_set_where(None)
    assert [record.at for record in trace.read(tmp_path)] == ['model.py:12 "quoted"']


def test_captured_calls_are_marked(traced: Driver, tmp_path: Path) -> None:
    """A prefetch inside a capture is told from one outside."""
    stream, device, graph = traced.stream(), traced.device(64), ctypes.c_void_p()
    traced.lib.aclrtCmoAsync(device.at, ctypes.c_size_t(64), 0, stream)
    traced.lib.aclmdlRICaptureBegin(stream, 0)
    traced.lib.aclrtCmoAsync(device.at, ctypes.c_size_t(64), 0, stream)
    traced.lib.aclmdlRICaptureEnd(stream, ctypes.byref(graph))
    calls = [r for r in trace.read(tmp_path) if r.kind == "call" and r.call == "cmo_async"]
    assert [r.captured for r in calls] == [False, True]


LINES = [
    '{"k":"mark","t":1.0,"tid":7,"name":"step 3"}',
    '{"k":"call","t":2.0,"c":"cmo_async","s":4,"n":96,"tid":7,"at":"a.py:3","step":"step 3"}',
    '{"k":"run","t":5.0,"d":0.5,"c":"cmo_async","s":4,"n":96}',
]


def test_chrome_trace_has_a_track_for_each_host_thread_and_stream(tmp_path: Path) -> None:
    """What Perfetto shows: instants on host threads, slices in microseconds on streams."""
    (tmp_path / "123.jsonl").write_text("\n".join(LINES))
    out = tmp_path / "trace.json"
    assert trace.export(tmp_path, out) == 3
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert set(names) == {"host thread 7", "stream 4"}
    (run,) = [e for e in events if e["ph"] == "X"]
    assert (run["ts"], run["dur"], run["pid"], run["tid"]) == (
        5000.0,
        500.0,
        123,
        names["stream 4"],
    )
    (call,) = [e for e in events if e["ph"] == "i" and e["cat"] == "cmo_async"]
    assert call["args"] == {"stream": 4, "bytes": 96, "at": "a.py:3", "step": "step 3"}


def test_last_line_cut_short_is_passed_over(tmp_path: Path) -> None:
    """A killed process leaves half a line; the rest of its trace is good."""
    (tmp_path / "1.jsonl").write_text("\n".join([*LINES, LINES[0][:20]]))
    assert len(trace.read(tmp_path)) == 3


def test_broken_line_is_named(tmp_path: Path) -> None:
    """A file that is no trace is refused with file and line."""
    (tmp_path / "1.jsonl").write_text("\n".join(["{}", *LINES]))
    with pytest.raises(trace.TraceError, match=r"1\.jsonl:1: not a line of a simnpu trace"):
        trace.read(tmp_path)
