"""uva-staging without a device: what it copies, when it waits, and how it goes off.

That the device gets upstream's bytes is held against the real vllm-ascend in tests/npu.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ascend_opt_passes.uva_staging import MODULE, NoRealUva, Not310P, Parameters, UvaStaging


class Event:
    """An event that happens when it is waited for, or when the test says so."""

    def __init__(self) -> None:
        self.happened = True
        self.waits = 0

    def record(self) -> None:
        """Lie behind what was queued."""
        self.happened = False

    def query(self) -> bool:
        """Return whether it has happened."""
        return self.happened

    def synchronize(self) -> None:
        """Wait."""
        self.waits += 1
        self.happened = True


class Buffer:
    """Upstream's buffer, 4 rows: `marked` are the rows that its `uva` would copy."""

    def __init__(self) -> None:
        self._cpu = torch.zeros(4, dtype=torch.float32)
        self._np = self._cpu.numpy()
        self._uva = torch.zeros(4, dtype=torch.float32)
        self._modified_indices: set[int] = set()

    def mark(self, row: int) -> None:
        """Upstream's callback."""
        self._modified_indices.add(row)


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> UvaStaging:
    """The pass on a device that captures nothing."""
    npu = SimpleNamespace(
        Event=Event, is_current_stream_capturing=lambda: False, synchronize=lambda device: None
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    return UvaStaging()


def write(staging: UvaStaging, buffer: Buffer, key: Any, value: Any) -> list[tuple[Any, Any]]:
    """Write through the view; return what went upstream's way."""
    upstream: list[tuple[Any, Any]] = []
    view = SimpleNamespace(_array=buffer._np, _callback=buffer.mark)
    staging.write_array(lambda *call: upstream.append(call), view, (key, value), {})
    return upstream


def test_first_rows_are_copied_at_once_and_marked_nowhere(staging: UvaStaging) -> None:
    """One copy of the rows that were written; the rest of the device's side is untouched."""
    buffer = Buffer()
    buffer._uva[:] = 9
    assert write(staging, buffer, slice(None, 3), [1, 2, 3]) == []
    assert buffer._uva.tolist() == [1, 2, 3, 9]
    assert not buffer._modified_indices
    assert staging.counters["copies"] == 1
    assert (staging.counters["rows_copied"], staging.counters["bytes_copied"]) == (3, 12)
    assert (staging.counters["steps"], staging.counters["held"]) == (1, 1)


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0), (3.0, 2.0, 1.0)])
def test_whatever_is_written_arrives(staging: UvaStaging, values: tuple[float, ...]) -> None:
    """Growing or shrinking, a value that differs from the last is copied."""
    buffer = Buffer()
    for value in values:
        write(staging, buffer, slice(None, 2), value)
        assert buffer._uva.tolist() == [value, value, 0, 0]


def test_the_host_does_not_wait_for_its_copy(
    staging: UvaStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that blocks is what the pass is there to avoid."""
    asked = []
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, source, **options: asked.append(options)
    )
    write(staging, Buffer(), slice(None, 2), 1.0)
    assert asked == [{"non_blocking": True}]


def test_the_same_bytes_are_not_copied_again(staging: UvaStaging) -> None:
    """But 0.0 and -0.0 are not the same bytes, equal as they are."""
    buffer = Buffer()
    for value in (0.0, -0.0, -0.0):
        write(staging, buffer, slice(None, 1), [value])
    assert (staging.counters["copies"], staging.counters["unchanged"]) == (1, 2)
    assert np.signbit(buffer._uva.numpy()[0])


def test_skip_unchanged_can_be_switched_off(staging: UvaStaging) -> None:
    """Then every write is a copy."""
    staging.parameters = Parameters(skip_unchanged=False)
    buffer = Buffer()
    for _ in range(3):
        write(staging, buffer, slice(None), [0.0] * 4)
    assert staging.counters["copies"] == 3


@pytest.mark.parametrize(
    "key",
    [1, slice(1, 3), slice(None, 4, 2), slice(0, None, -1), [0], (slice(None, 2),), ...],
)
def test_other_writes_go_upstreams_way(staging: UvaStaging, key: Any) -> None:
    """Rows that are not the first ones are written and marked by upstream."""
    assert write(staging, Buffer(), key, 5.0) == [(key, 5.0)]
    assert (staging.counters["upstream"], staging.counters["held"]) == (1, 0)


def test_marked_rows_are_left_to_upstream(staging: UvaStaging) -> None:
    """On a buffer with marked rows, upstream copies the first rows as well, in its order."""
    buffer = Buffer()
    buffer.mark(2)
    assert write(staging, buffer, slice(None, 3), [1, 2, 3]) == [(slice(None, 3), [1, 2, 3])]
    assert buffer._modified_indices == {2}


def test_a_captured_write_goes_upstreams_way(staging: UvaStaging) -> None:
    """And asks no event: that could break the capture."""
    buffer = Buffer()
    write(staging, buffer, slice(None, 1), [1])
    staging._npu.is_current_stream_capturing = lambda: True
    assert write(staging, buffer, slice(None, 1), [2]) == [(slice(None, 1), [2])]
    assert staging._staged[buffer].event.waits == 0


@pytest.mark.parametrize("key", [slice(None, 2), 3])
def test_no_write_before_the_device_has_read(staging: UvaStaging, key: Any) -> None:
    """Whatever is written next, first the copy before it has to be done."""
    buffer = Buffer()
    write(staging, buffer, slice(None, 2), [1, 2])
    event = staging._staged[buffer].event
    write(staging, buffer, key, 7.0)
    assert (event.waits, staging.counters["waits"]) == (1, 1)


def test_no_wait_where_the_copy_is_done(staging: UvaStaging) -> None:
    """As in steady decode."""
    buffer = Buffer()
    write(staging, buffer, slice(None, 2), [1, 2])
    staging._staged[buffer].event.happened = True
    write(staging, buffer, slice(None, 2), [3, 4])
    assert staging.counters["waits"] == 0


def test_going_off_waits_for_what_was_issued(staging: UvaStaging) -> None:
    """Once for the device; not at all where nothing is under way."""
    waited: list[Any] = []
    staging._npu.synchronize = waited.append
    buffers = [Buffer(), Buffer()]
    for buffer in buffers:
        write(staging, buffer, slice(None, 1), [1])
    staging.fail("planted")
    staging.reverted()
    assert waited == [buffers[0]._uva.device]


def test_going_off_waits_for_nothing_that_has_arrived(staging: UvaStaging) -> None:
    """A copy that a later write found done is not waited for again."""
    waited: list[Any] = []
    staging._npu.synchronize = waited.append
    buffer = Buffer()
    write(staging, buffer, slice(None, 1), [1])
    staging._staged[buffer].event.happened = True
    write(staging, buffer, slice(None, 1), [1])
    staging.reverted()
    assert (staging.counters["copies"], waited) == (1, [])


def test_what_upstream_refuses_is_refused_alike(staging: UvaStaging) -> None:
    """The caller gets the error of the original, which is called; the rows count as written."""

    def original(key: Any, value: Any) -> None:
        raise ValueError("could not broadcast")

    buffer = Buffer()
    view = SimpleNamespace(_array=buffer._np, _callback=buffer.mark)
    with pytest.raises(ValueError, match="could not broadcast"):
        staging.write_array(original, view, (slice(None, 2), [1, 2, 3]), {})
    assert buffer._modified_indices == {0, 1}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, None),
        (SimpleNamespace(), None),  # up to 0.22.1rc1 nothing is asked
        (SimpleNamespace(is_uva_available=lambda: False), None),
        (
            SimpleNamespace(is_uva_available=lambda: True),
            "real UVA is on (PYTORCH_NPU_ALLOC_CONF has pinned_mem_register:True)",
        ),
    ],
)
def test_real_uva_is_refused(
    module: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the release itself says."""
    if module is not None:
        monkeypatch.setitem(sys.modules, MODULE, module)
    assert NoRealUva().unmet(None, None) == reason


def test_310p_is_refused() -> None:
    """Its sampler writes the device's side of the tables itself."""

    def engine(worker: str) -> Any:
        return SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker))

    worker = "vllm_ascend._310p.worker_310p.NPUWorker310"
    expected = f"the device is an Ascend 310P (worker {worker})"
    assert Not310P().unmet(engine(worker), None) == expected
    assert Not310P().unmet(engine("vllm_ascend.worker.worker.NPUWorker"), None) is None


def test_the_status_says_what_the_release_did() -> None:
    """Blocking copies are another matter than bookkeeping."""
    instance = UvaStaging()
    instance.variants = {f"{MODULE}:UvaBufferWrapper": "blocks"}
    assert "blocks on each copy" in instance.applied()
    instance.variants = {f"{MODULE}:UvaBufferWrapper": "queues"}
    assert "without marking rows" in instance.applied()


def test_importing_the_pass_imports_no_array_library() -> None:
    """`list-passes` and every vLLM process import it."""
    code = (
        "import sys, ascend_opt_passes.uva_staging;"
        "sys.exit(bool({'numpy', 'torch', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
