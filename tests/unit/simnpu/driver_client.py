"""The simulated driver through ctypes: what torch_npu would call, without torch."""

import ctypes
from collections.abc import Callable
from pathlib import Path

H2D, D2H, D2D = 1, 2, 3
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Driver:
    """One loaded driver; calls return its error code unless they say otherwise."""

    def __init__(self, directory: Path, *, late: bool = True) -> None:
        self.lib = ctypes.CDLL(str(directory / "libascendcl.so"))
        self.lib.simnpu_call_name.restype = ctypes.c_char_p
        self.lib.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.lib.simnpu_pending.restype = ctypes.c_long
        self.lib.simnpu_set_patience.argtypes = [ctypes.c_double]
        self.lib.simnpu_set_delivery(int(late))
        self._kept: list[object] = []

    def _make(self, create: str, *args: object) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        assert getattr(self.lib, create)(ctypes.byref(out), *args) == 0, self.error()
        return out

    def stream(self) -> ctypes.c_void_p:
        return self._make("aclrtCreateStream")

    def event(self) -> ctypes.c_void_p:
        return self._make("aclrtCreateEventWithFlag", 0)

    def device(self, n: int = 8) -> "Buffer":
        return Buffer(self._make("aclrtMalloc", ctypes.c_size_t(n), 0), n)

    def pinned(self, n: int = 8) -> "Buffer":
        return Buffer(self._make("aclrtMallocHost", ctypes.c_size_t(n)), n)

    def copy(self, dst: "Buffer", src: "Buffer", kind: int, stream: ctypes.c_void_p) -> int:
        size = ctypes.c_size_t(dst.n)
        return self.lib.aclrtMemcpyAsync(dst.at, size, src.at, size, kind, stream)

    def work(self, stream: ctypes.c_void_p, function: Callable[[], None], name: str = "k") -> int:
        """Queue a Python function as a kernel."""
        wrapped = _WORK(lambda _: function())
        self._kept.append(wrapped)
        return self.lib.simnpu_enqueue(stream, name.encode(), wrapped, None, None)

    def error(self) -> str:
        return self.lib.aclGetRecentErrMsg().decode()

    def counters(self) -> dict[str, dict[str, int]]:
        kinds = self.lib.simnpu_call_kinds()
        names = [self.lib.simnpu_call_name(i).decode() for i in range(kinds)]
        room = (ctypes.c_long * (5 * kinds))()
        self.lib.simnpu_counters(room)
        rows = ("calls", "bytes", "replayed", "replayed_bytes", "executed")
        return {
            row: dict(zip(names, room[i * kinds : (i + 1) * kinds], strict=True))
            for i, row in enumerate(rows)
        }


class Buffer:
    """Bytes at an address of the driver's."""

    def __init__(self, at: ctypes.c_void_p, n: int) -> None:
        self.at, self.n = at, n

    def fill(self, value: int) -> "Buffer":
        ctypes.memset(self.at, value, self.n)
        return self

    @property
    def value(self) -> int:
        """The first byte."""
        return ctypes.string_at(self.at, 1)[0]
