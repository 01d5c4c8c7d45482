"""A runner of a real vllm-ascend release, as light as its length methods allow.

`NPUModelRunner`, `AscendRequestState` and `AscendInputBuffers` are compiled from the release's
own files; only what they inherit from vLLM is replaced, by the few lines of it that touch token
counts. Device tensors are CPU tensors. Streams and events are fakes with the one property that
matters: **a copy to the host is delivered when its event is waited for and not before**, so code
that skips the wait and reads the buffer gets old values.
"""

from __future__ import annotations
import __future__

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from compat.releases import module_file

V2 = "vllm_ascend.worker.v2"
_METHODS = (
    "_update_seq_lens_cpu",
    "_copy_num_computed_tokens_to_cpu",
    "postprocess",
    "postprocess_sampled",
    "postprocess_num_computed_tokens",
)
NEVER_WRITTEN = -777
"""What a host buffer holds before its first copy arrives (upstream: torch.empty)."""


# --- the device -----------------------------------------------------------------------------------


class Stream:
    """A queue of copies that nobody has waited for."""

    current: Stream

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []

    def wait_stream(self, other: Stream) -> None:
        """Order after the other stream; the fake device computes at once, so it is already."""

    def __enter__(self) -> Stream:
        self._outer, Stream.current = Stream.current, self
        return self

    def __exit__(self, *error: object) -> None:
        Stream.current = self._outer


class Event:
    """Delivers, when waited for, what was queued on its stream before it was recorded."""

    def __init__(self) -> None:
        self.waits = 0
        self._recorded: list[Callable[[], None]] = []

    def record(self) -> None:
        """Mark the current stream's queue."""
        self._recorded = list(Stream.current.pending)
        Stream.current.pending.clear()

    def synchronize(self) -> None:
        """Wait."""
        self.waits += 1
        for deliver in self._recorded:
            deliver()
        self._recorded = []


class HostBuffer:
    """A pinned tensor on the host, shape [max_num_reqs], that receives asynchronous copies."""

    def __init__(self, size: int) -> None:
        self.copies = 0
        self.tensor = torch.full((size,), NEVER_WRITTEN, dtype=torch.int32)

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        """Queue a copy of what the device holds now."""
        assert non_blocking
        self.copies += 1
        now = source.clone()
        Stream.current.pending.append(lambda: self.tensor.copy_(now))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensor[index]


@contextmanager
def fake_device() -> Iterator[None]:
    """Put the fake streams where upstream's methods, and our pass, look for them."""
    Stream.current = Stream()
    fake = SimpleNamespace(stream=lambda s: s, current_stream=lambda: Stream.current)
    missing = object()
    npu, current_stream = getattr(torch, "npu", missing), torch.cuda.current_stream
    torch.npu, torch.cuda.current_stream = fake, fake.current_stream
    try:
        yield
    finally:
        torch.cuda.current_stream = current_stream
        if npu is missing:
            del torch.npu
        else:
            torch.npu = npu


# --- what the release's classes inherit from vLLM -------------------------------------------------


class StagedTensor:
    """vLLM's `StagedWriteTensor`, written at once."""

    def __init__(self, size: int) -> None:
        self.gpu = torch.zeros(size, dtype=torch.int32)


class RequestState:
    """vLLM's `RequestState`: rows of requests, and their token counts."""

    has_mirror = True  # since vLLM 0.20

    def __init__(self, max_num_reqs: int, *args: Any) -> None:
        self.max_num_reqs = max_num_reqs
        self.req_id_to_index: dict[str, int] = {}
        self.free_indices = list(range(max_num_reqs))
        self.num_computed_tokens = StagedTensor(max_num_reqs)
        if self.has_mirror:
            self.num_computed_tokens_np = np.zeros(max_num_reqs, dtype=np.int32)

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        all_token_ids: list[int],
        num_computed_tokens: int,
        max_tokens: int | None = None,
    ) -> None:
        """Give a request a free row."""
        row = self.free_indices.pop()
        self.req_id_to_index[req_id] = row
        self.num_computed_tokens.gpu[row] = num_computed_tokens
        if self.has_mirror:
            self.num_computed_tokens_np[row] = num_computed_tokens

    def remove_request(self, req_id: str) -> None:
        """Free a request's row, if it has one."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            self.free_indices.append(row)


class InputBuffers:
    """vLLM's `InputBuffers`, the part that `AscendInputBuffers` replaces."""

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: Any) -> None:
        self.query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32)


class GPUModelRunner:
    """vLLM's `GPUModelRunner`: how a step updates rows and counts."""

    req_states: Any
    input_buffers: Any

    def __init__(self, request_state: type, input_buffers: type, max_num_reqs: int) -> None:
        self.max_num_reqs = max_num_reqs
        self.speculator = self.speculative_config = None
        self.num_speculative_steps = 0
        self.sync_spec_pp_cpu_counts = self.use_pp = False
        self.is_last_pp_rank = True
        self.model_config = SimpleNamespace(hf_config=None)
        self.req_states = request_state(max_num_reqs, 4096, 4096, 0, 32, "cpu")
        self.input_buffers = input_buffers(max_num_reqs, 4096, "cpu")
        self.num_computed_tokens_event = Event()
        self.num_computed_tokens_stream = Stream()
        self.num_computed_tokens_cpu = HostBuffer(max_num_reqs)

    def update_states(self, output: Any) -> None:
        """`finish_requests`, `add_requests` and `update_requests` of vLLM."""
        states = self.req_states
        for req_id in sorted(output.finished_req_ids | (output.preempted_req_ids or set())):
            states.remove_request(req_id)
        for new in output.scheduled_new_reqs:
            states.remove_request(new.req_id)
            states.add_request(new.req_id, 1, [0], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        if states.has_mirror:
            for req_id, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                states.num_computed_tokens_np[states.req_id_to_index[req_id]] = count

    def prepare(self, output: Any, num_reqs_padded: int) -> list[str]:
        """`prepare_inputs`: the lengths, then upstream's padding. Returns the batch order."""
        tokens = output.num_scheduled_tokens
        req_ids = sorted(tokens, key=lambda req_id: (tokens[req_id] != 1, tokens[req_id]))
        self._update_seq_lens_cpu(output, req_ids)  # type: ignore[attr-defined]
        self.input_buffers.seq_lens_np[num_reqs_padded:] = 0
        return req_ids

    def finish_step(self, output: Any, req_ids: Sequence[str]) -> None:
        """`sample_tokens`: the device advances its counts; nothing is rejected."""
        rows = torch.tensor([self.req_states.req_id_to_index[r] for r in req_ids])
        tokens = torch.tensor([output.num_scheduled_tokens[r] for r in req_ids], dtype=torch.int32)
        batch = SimpleNamespace(idx_mapping=rows, num_tokens=tokens)
        if self.old_design:  # type: ignore[attr-defined]
            self.postprocess(batch, None, None, None)
        else:
            self.postprocess_sampled(rows, None, None, None, tokens)

    def postprocess(self, input_batch: Any, *sampled: Any) -> None:
        """Advance the device's counts (vLLM up to 0.20)."""
        self._advance(input_batch.idx_mapping, input_batch.num_tokens)

    def postprocess_sampled(self, idx_mapping: Any, *sampled: Any) -> None:
        """Advance the device's counts (vLLM from 0.21 on)."""
        self._advance(idx_mapping, sampled[-1])

    def _advance(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        self.req_states.num_computed_tokens.gpu[rows] += tokens

    def dummy_run(self, num_reqs: int) -> None:
        """Write what a dummy batch (data parallel, capture) leaves in the length buffer."""
        self.input_buffers.seq_lens_np[:num_reqs] = 1
        self.input_buffers.seq_lens_np[num_reqs:] = 0


# --- the release ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """The runner module of one release, compiled from its files.

    Attributes:
        version: The release.
        module: Stands for `vllm_ascend.worker.v2.model_runner`; holds `NPUModelRunner`.
        request_state: Its `AscendRequestState`.
        input_buffers: Its `AscendInputBuffers`.
    """

    version: str
    module: ModuleType
    request_state: type
    input_buffers: type

    def runner(self, max_num_reqs: int) -> Any:
        """Return a new runner."""
        return self.module.NPUModelRunner(self.request_state, self.input_buffers, max_num_reqs)


def load(version: str) -> Release:
    """Compile a fresh copy of a release's classes over the light parents."""
    number = tuple(int(part) for part in version.split(".")[:2])
    parent = type("RequestState", (RequestState,), {"has_mirror": number >= (0, 20)})
    states = _compile(version, f"{V2}.states", "AscendRequestState", RequestState=parent)
    buffers = _compile(version, f"{V2}.input_batch", "AscendInputBuffers")
    runner = _compile(version, f"{V2}.model_runner", "NPUModelRunner", _METHODS)
    old = number < (0, 21)
    assert old != hasattr(runner.NPUModelRunner, "_copy_num_computed_tokens_to_cpu")
    runner.NPUModelRunner.old_design = old
    return Release(version, runner, states.AscendRequestState, buffers.AscendInputBuffers)


def _compile(
    version: str, module: str, name: str, methods: Sequence[str] = (), **parents: Any
) -> ModuleType:
    """Run one class of a release's module, with all or some of its methods, and nothing else."""
    made = ModuleType(module)
    light = {"GPUModelRunner": GPUModelRunner, "InputBuffers": InputBuffers} | parents
    vars(made).update(light, torch=torch, np=np, is_deepseek_v41=lambda config: False)
    exec(_code(version, module, name, tuple(methods)), vars(made))
    return made


@cache
def _code(version: str, module: str, name: str, methods: tuple[str, ...]) -> CodeType:
    file = module_file(version, module)
    tree = ast.parse(file.read_text())
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    if methods:
        cls.body = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name in methods]
    tree.body = [cls]
    # Under the real file name, so that a live method is found to have the release's own source.
    return compile(tree, str(file), "exec", flags=__future__.annotations.compiler_flag)


@dataclass
class Scheduled:
    """One request as the scheduler of `Scheduler` knows it."""

    num_tokens: int
    num_computed: int = 0


@dataclass
class Scheduler:
    """The token accounting of vLLM's scheduler under Model Runner V2.

    Attributes:
        running: Requests that have a row, in scheduling order.
        waiting: Requests that have none: new, or preempted.
    """

    running: dict[str, Scheduled] = field(default_factory=dict)
    waiting: dict[str, Scheduled] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _preempted: set[str] = field(default_factory=set)

    def finish(self, req_id: str) -> None:
        """End a running request; the runner hears of it with the next output."""
        del self.running[req_id]
        self._finished.add(req_id)

    def preempt(self, req_id: str) -> None:
        """Take a running request's row away; all of it is computed again later."""
        request = self.running.pop(req_id)
        request.num_computed = 0
        self.waiting[req_id] = request
        self._preempted.add(req_id)

    def schedule(self, tokens: dict[str, int], admitted: dict[str, tuple[int, int]]) -> Any:
        """Make a step's `SchedulerOutput`.

        Args:
            tokens: Running request to its tokens of this step; the others are left out.
            admitted: Waiting request to the tokens of its prefix hit and of this step.
        """
        cached = [r for r in self.running if r in tokens]
        counts = [self.running[r].num_computed for r in cached]
        new = []
        scheduled = {r: tokens[r] for r in cached}
        for req_id, (hit, first) in admitted.items():
            request = self.running[req_id] = self.waiting.pop(req_id)
            request.num_computed = hit
            new.append(SimpleNamespace(req_id=req_id, num_computed_tokens=hit))
            scheduled[req_id] = first
        output = make_output(scheduled, cached, counts, new, self._finished, self._preempted)
        self._finished, self._preempted = set(), set()
        for req_id, count in scheduled.items():
            request = self.running[req_id]
            request.num_computed += count
            if request.num_computed == request.num_tokens:
                request.num_tokens += 1  # a token is sampled
        return output


def make_output(
    scheduled: dict[str, int],
    cached: list[str],
    counts: list[int],
    new: Sequence[Any] = (),
    finished: set[str] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """Return what the length methods read of a `SchedulerOutput`."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached, num_computed_tokens=counts, resumed_req_ids=set()
        ),
        finished_req_ids=finished or set(),
        preempted_req_ids=preempted or set(),
    )


@contextmanager
def installed(release: Release) -> Iterator[None]:
    """Let the release's runner module be the imported one."""
    before = sys.modules.get(release.module.__name__)
    sys.modules[release.module.__name__] = release.module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[release.module.__name__]
        else:
            sys.modules[release.module.__name__] = before
