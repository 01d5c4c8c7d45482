"""sync-elision: sequence lengths on the host without waiting for the device.

What upstream does. Ascend's attention needs every request's length on the host. Model Runner V2
takes them from the device: after each step it copies `num_computed_tokens` back on a side stream,
and `_update_seq_lens_cpu` waits for that copy before it prepares the next step. So the host can
never run ahead of the device. Then it fills the lengths in a Python loop that indexes torch
tensors one element at a time.

What this pass does. Up to 0.26.0rc1: no copy, no wait; the counts come from the scheduler, which
sent them with the step. From 0.27.1rc1 on upstream itself elides (#13382), so its gate is kept.
In every release the loop becomes a handful of NumPy calls, and in steady decode (the same
requests as last step, one token each) the batch's rows are kept, so that no request is looked up.

Why it is right. The device's count of a request is what the scheduler sent when it was added,
plus the tokens of every step since, minus the rejected ones. The scheduler adds the same tokens
as soon as it has scheduled them (`Scheduler._update_after_schedule`), asynchronous scheduling
included, so the two can differ by rejected tokens only:

- Rejections need speculation or a diffusion model. The first is asked of the *configuration*: a
  runner's `speculator` is None on every pipeline rank but the last, while tokens are rejected on
  all of them (vllm-ascend #15171, #16007).
- Chunked prefill, prefix hits: the count sent with the request, plus chunks. Nothing else moves.
- A preempted request is removed from the runner and comes back in `scheduled_new_reqs`, on any
  free row, with a fresh count. So does a finished request's row, under another id.
- A request that a step leaves out (pipeline microbatches) keeps its count on both sides.
- A failed KV load under the recompute policy rewinds the scheduler's count alone (vllm #49250).

Rows of a batch are kept only while the scheduler reports no new, finished, preempted or resumed
request. An equal list of ids would not be enough: a request can come back on another row.

Trap. Once a copy was elided, upstream's own method would read a stale one. So whenever this pass
goes off while a runner lives (`disable`, or an error of ours), it first makes the copy that the
runner's next step is going to wait for.

Shadow mode. Upstream copies, waits and fills as ever; beside it the same code as in active mode
fills buffers of its own, which are compared with upstream's over all their rows. So up to
0.26.0rc1 the scheduler's count of each request meets the device's in every step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ascend_opt import (
    EngineCondition,
    NoKVLoadRecompute,
    NoSpeculator,
    Pass,
    Requires,
    Shadow,
    difference,
    hookimpl,
    host_patch,
    shadow_of,
)
from ascend_opt_passes.conditions import ModelRunnerV2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODULE = "vllm_ascend.worker.v2.model_runner"
UPDATE = f"{MODULE}:NPUModelRunner._update_seq_lens_cpu"
COPY = f"{MODULE}:NPUModelRunner._copy_num_computed_tokens_to_cpu"
POSTPROCESS = f"{MODULE}:NPUModelRunner.postprocess"


class NoDiffusion(EngineCondition):
    """The model decodes one token at a time: diffusion models reject without a speculator."""

    name = "no-diffusion"
    description = "the model is not a diffusion language model"

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        diffusion = getattr(subject, "diffusion_config", None)
        return None if diffusion is None else "the model is a diffusion language model"


class SyncElision(Pass):
    """Do not wait for a device-to-host copy whose values the scheduler already sent."""

    name = "sync-elision"
    version = "1"
    origin = "vllm-ascend #13382"
    remove_when = (
        "no release up to 0.26.0rc1 is in use, and upstream's _update_seq_lens_cpu has no loop "
        "over requests"
    )
    effect = "held"
    conditions = (
        Requires("vllm-ascend>=0.18.0"),
        NoSpeculator(),
        NoDiffusion(),
        NoKVLoadRecompute(),
        ModelRunnerV2(),
    )

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._lengths: _Lengths | None = None
        self._uncopied: WeakSet[Any] = WeakSet()  # runners with an elided copy
        # In shadow mode nothing is elided, so nothing of the above is used.
        self._compared: _ComparedLengths | None = None
        self._outdated: WeakSet[Any] = WeakSet()  # runners without a copy since their last step

    @property
    def _waits(self) -> bool:
        return self.variants.get(UPDATE) == "waits"

    def applied(self) -> str:
        """See `Pass.applied`."""
        if self._waits:
            return "elides the copy and the wait of every step; fills the lengths with NumPy"
        return "fills the lengths with NumPy (this release elides the wait itself)"

    @host_patch(
        UPDATE,
        known={
            "81afd81e0e785e2e": "waits",  # 0.18.0 to 0.26.0rc1
            "16342534a3fc3ef6": "mirrors",  # 0.27.1rc1: counts from vLLM's NumPy mirror
            "0baf24fed9e27119": "shares",  # 0.28.0rc1, 0.29.0rc1: one storage with the mirror
            "64f6f08cc3b6457a": "shares",  # 0.30.0rc1, 0.30.0rc2: another gate
        },
    )
    def update_seq_lens(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        """Fill the host's lengths of one batch."""
        counters = self.counters
        counters["steps"] += 1
        # Implies upstream's own gates: each needs a speculator or a speculative configuration.
        if _rejects(runner):
            return wrapped(*args, **kwargs)
        counters["held"] += 1
        if self._fill(runner.req_states, runner.input_buffers, *args, **kwargs):
            counters["rows_kept"] += 1
        if self._waits:
            counters["waits_elided"] += 1
        return None

    def _fill(
        self, req_states: Any, input_buffers: Any, scheduler_output: Any, req_ids: list[str]
    ) -> bool:
        """Fill the lengths; return whether the rows of the last batch served again."""
        lengths = self._lengths
        if lengths is None or not lengths.belongs_to(req_states, input_buffers):
            lengths = self._lengths = _Lengths(req_states, input_buffers, self._waits)
        return lengths.fill(scheduler_output, req_ids)

    @host_patch(COPY, known={"9008be1dd891db29": "copies"}, optional=True)
    def copy_num_computed_tokens(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        """Leave out the copy (0.21.0rc1 to 0.26.0rc1; later releases call it for speculation)."""
        return None if self._elide_copy(runner) else wrapped(*args, **kwargs)

    @host_patch(
        POSTPROCESS,
        known={
            "a51263df64ae63fb": "copies",  # 0.18.0 to 0.20.2rc1: the copy is in its body
            "3bfdda7f26d01e9b": "calls",  # 0.21.0rc1 to 0.26.0rc1: it calls the method above
        },
        leave=frozenset({"calls"}),
        optional=True,
        redo=False,  # a second call would count the step's tokens twice
    )
    def postprocess(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        """Do what upstream's override does, but for the copy at its end."""
        if not self._elide_copy(runner):
            return wrapped(*args, **kwargs)
        inherited: Any = super(sys.modules[MODULE].NPUModelRunner, runner)
        return inherited.postprocess(*args, **kwargs)

    @shadow_of(update_seq_lens)
    def compare_seq_lens(self, runner: Any, args: Any, kwargs: Any) -> Shadow:
        """Fill buffers of our own, and hold upstream's against them."""
        counters = self.counters
        counters["steps"] += 1
        if _rejects(runner):
            return None
        counters["held"] += 1
        return (yield from self._compare(runner, *args, **kwargs))

    def _compare(self, runner: Any, scheduler_output: Any, req_ids: list[str]) -> Shadow:
        buffers = runner.req_states, runner.input_buffers
        lengths = self._compared
        if lengths is None or not lengths.belongs_to(*buffers):
            lengths = self._compared = _ComparedLengths(*buffers, self._waits)
        if lengths.fill(scheduler_output, req_ids):
            self.counters["rows_kept"] += 1
        outdated = self._waits and runner in self._outdated
        self._outdated.add(runner)
        yield
        # Some steps make no copy (pooling models; chunks of prefill on a pipeline rank that is
        # not the last). The next one reads an older copy: upstream's fault, and no measure.
        return None if outdated else lengths.differences(req_ids)

    @shadow_of(copy_num_computed_tokens, postprocess)
    def note_copy(self, runner: Any, args: Any, kwargs: Any) -> Shadow:
        """Remember that the runner's next step reads a copy of its counts as they are now."""
        self._outdated.discard(runner)
        yield
        return None

    def _elide_copy(self, runner: Any) -> bool:
        """Return whether nobody reads this runner's copy, since we fill its lengths."""
        lengths = self._lengths
        if (
            not self._waits
            or _rejects(runner)
            or lengths is None
            or not lengths.belongs_to(runner.req_states, runner.input_buffers)
        ):
            return False
        self._uncopied.add(runner)
        self.counters["copies_elided"] += 1
        return True

    def fail(self, reason: str) -> None:
        """See `Pass.fail`; upstream's method, which takes over at once, finds its copy."""
        super().fail(reason)
        self.reverted()

    def reverted(self) -> None:
        """Drop the kept batch, and make the copies that upstream's next steps wait for."""
        self._lengths = self._compared = None
        while self._uncopied:
            _copy_now(self._uncopied.pop())


@hookimpl
def ascend_opt_passes() -> list[type[Pass]]:
    """Register the pass."""
    return [SyncElision]


def _rejects(runner: Any) -> bool:
    """Return whether this runner's steps may reject tokens."""
    return (
        runner.speculator is not None
        or runner.speculative_config is not None
        or runner.num_speculative_steps != 0  # diffusion
    )


def _copy_now(runner: Any) -> None:
    """Issue upstream's copy of the device's counts, on upstream's stream, with its event."""
    if hasattr(runner, "_copy_num_computed_tokens_to_cpu"):
        runner._copy_num_computed_tokens_to_cpu()  # ours is out by now, or inert
        return
    import torch

    stream = runner.num_computed_tokens_stream
    default_stream = torch.npu.current_stream()
    with torch.npu.stream(stream):
        stream.wait_stream(default_stream)
        counts = runner.req_states.num_computed_tokens.gpu
        runner.num_computed_tokens_cpu.copy_(counts, non_blocking=True)
        runner.num_computed_tokens_event.record()


_NOTHING_KEPT = -1  # a number of requests that no step has


class _Lengths:
    """The length buffers of one runner on the host, and the rows of its last batch.

    Holds the buffers and never the runner, whose device memory must not outlive it. Rows index
    the buffers of shape [max_num_reqs]; a request has one from when it is added until it ends.

    Args:
        req_states: The runner's `AscendRequestState`.
        input_buffers: The runner's `AscendInputBuffers`.
        waits: Whether upstream's method takes the counts from the device; then they come from the
            scheduler's output here, else from where upstream has them.
    """

    def __init__(self, req_states: Any, input_buffers: Any, waits: bool) -> None:
        import numpy as np

        self._req_id_to_index: dict[str, int] = req_states.req_id_to_index
        self._counts_tensor = req_states.num_computed_tokens_cpu
        self._seq_lens_tensor = input_buffers.seq_lens_cpu
        self._counts: NDArray[np.int32] = self._counts_tensor.numpy()
        self._seq_lens: NDArray[np.int32] = self._seq_lens_tensor.numpy()
        # vLLM's own copy of the scheduler's counts, which it updates just before us; absent
        # before vLLM 0.20, and since vllm-ascend 0.28.0rc1 the same storage as `_counts`.
        self._mirror: NDArray[np.int32] | None = getattr(req_states, "num_computed_tokens_np", None)
        self._shared = self._mirror is not None and np.shares_memory(self._mirror, self._counts)
        self._waits = waits
        self._add, self._fromiter = np.add, np.fromiter
        self._ones = np.ones_like(self._seq_lens)
        self._scratch = np.empty_like(self._counts)
        self._keep_nothing()

    def belongs_to(self, req_states: Any, input_buffers: Any) -> bool:
        """Return whether these are still the buffers of that runner."""
        return (
            req_states.req_id_to_index is self._req_id_to_index
            and req_states.num_computed_tokens_cpu is self._counts_tensor
            and input_buffers.seq_lens_cpu is self._seq_lens_tensor
            and (self._mirror is None or req_states.num_computed_tokens_np is self._mirror)
        )

    def fill(self, scheduler_output: Any, req_ids: list[str]) -> bool:
        """Write the lengths of a batch into rows 0 to len(req_ids), and its counts where they go.

        Args:
            scheduler_output: The step's `SchedulerOutput`.
            req_ids: The batch's requests in batch order.

        Returns:
            Whether the rows of the last batch were used again.
        """
        if self._same_batch(scheduler_output, req_ids):
            counts = self._batch_counts
            self._mirror.take(self._rows, None, counts, "clip")  # type: ignore[union-attr]
            if not self._shared:
                self._counts[self._rows] = counts
            self._add(counts, self._batch_ones, self._batch_seq_lens)
            return True
        self._fill_any(scheduler_output, req_ids)
        return False

    def _same_batch(self, scheduler_output: Any, req_ids: list[str]) -> bool:
        """Return whether this is the last batch again, each request on its row, one token each.

        A request gets its row in the step that first schedules it, so no change of rows passes by
        unseen between two calls.
        """
        cached = scheduler_output.scheduled_cached_reqs
        num_tokens = scheduler_output.total_num_scheduled_tokens
        return (
            # As many tokens as requests: one each, since a scheduled request has at least one.
            self._num_reqs == num_tokens
            and not scheduler_output.scheduled_new_reqs
            and not scheduler_output.finished_req_ids
            and not scheduler_output.preempted_req_ids
            and not cached.resumed_req_ids
            and req_ids == self._req_ids
        )

    def _fill_any(self, scheduler_output: Any, req_ids: list[str]) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        rows = None
        # Steady decode reads the mirror. Where upstream has the counts from the device, keep no
        # batch before the mirror was seen to hold what the scheduler sent.
        mirrored = not self._waits
        if cached.req_ids and not self._shared:
            cached_rows = self._rows_of(cached.req_ids)
            counts = None if self._mirror is None else self._mirror[cached_rows]
            if self._waits:
                mirrored = counts is not None and counts.tolist() == cached.num_computed_tokens
                if not mirrored:
                    counts = self._fromiter(cached.num_computed_tokens, "i4", len(cached_rows))
            self._counts[cached_rows] = counts
            if req_ids == cached.req_ids:
                rows = cached_rows
        if rows is None:
            rows = self._rows_of(req_ids)
        num_reqs = len(req_ids)
        tokens = map(scheduler_output.num_scheduled_tokens.__getitem__, req_ids)
        num_tokens = self._fromiter(tokens, "i4", num_reqs)
        self._add(self._counts[rows], num_tokens, self._seq_lens[:num_reqs])
        self._keep(list(req_ids), rows)
        if not mirrored:
            self._keep_nothing()

    def _rows_of(self, req_ids: list[str]) -> NDArray[np.intp]:
        rows = map(self._req_id_to_index.__getitem__, req_ids)
        return self._fromiter(rows, "i8", len(req_ids))

    def _keep(self, req_ids: list[str], rows: NDArray[np.intp]) -> None:
        """Keep a batch for the next step."""
        self._req_ids = req_ids
        self._rows = rows
        self._num_reqs = num_reqs = len(req_ids)
        self._batch_ones = self._ones[:num_reqs]
        self._batch_counts = self._scratch[:num_reqs]
        self._batch_seq_lens = self._seq_lens[:num_reqs]

    def _keep_nothing(self) -> None:
        """Have the next step look its rows up."""
        self._num_reqs = _NOTHING_KEPT


class _ComparedLengths(_Lengths):
    """Fills copies of a runner's length buffers, made before each step; upstream fills the real.

    Args: See `_Lengths`.
    """

    def __init__(self, req_states: Any, input_buffers: Any, waits: bool) -> None:
        super().__init__(req_states, input_buffers, waits)
        self._upstream_counts, self._upstream_seq_lens = self._counts, self._seq_lens
        self._counts, self._seq_lens = self._counts.copy(), self._seq_lens.copy()

    def fill(self, scheduler_output: Any, req_ids: list[str]) -> bool:
        """Fill our copies before upstream fills its buffers; see `_Lengths.fill`."""
        self._counts[:] = self._upstream_counts
        self._seq_lens[:] = self._upstream_seq_lens
        return super().fill(scheduler_output, req_ids)

    def differences(self, req_ids: list[str]) -> list[str | None]:
        """Compare all rows, padding and free rows included, after upstream has filled them."""

        def of_row(row: int) -> str:
            held = (req_id for req_id, index in self._req_id_to_index.items() if index == row)
            return next(held, "a free row")

        def of_batch(position: int) -> str:
            return req_ids[position] if position < len(req_ids) else "padding"

        return [
            difference("num_computed_tokens", self._upstream_counts, self._counts, of_row),
            difference("seq_lens", self._upstream_seq_lens, self._seq_lens, of_batch),
        ]
