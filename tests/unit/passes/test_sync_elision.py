"""sync-elision without a release and without torch: its gates, and when it keeps rows.

That its values are upstream's is held against the real methods in tests/compat.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ascend_opt.shadow import shadowing
from ascend_opt_passes.sync_elision import (
    COPY,
    UPDATE,
    NoDiffusion,
    SyncElision,
    _Lengths,
)


class Tensor:
    """A tensor on the host, as far as the pass looks at it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def numpy(self) -> Any:
        """Return the array that shares the tensor's storage."""
        return self.array

    def __eq__(self, other: object) -> bool:
        """Have no truth, as the elementwise comparison of two tensors."""
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    __hash__ = object.__hash__


class Runner:
    """A runner with requests a, b, c on rows 3, 1, 2 of 4; row 0 is free.

    Args:
        shared: The mirror is the counts' storage (0.28.0rc1 and later).
        mirror: There is a mirror (vLLM 0.20 and later).
    """

    def __init__(self, shared: bool = False, mirror: bool = True) -> None:
        self.speculator = self.speculative_config = None
        self.num_speculative_steps = 0
        counts = np.array([90, 20, 30, 10], np.int32)
        self.req_states = SimpleNamespace(
            req_id_to_index={"a": 3, "b": 1, "c": 2}, num_computed_tokens_cpu=Tensor(counts)
        )
        if mirror:
            self.req_states.num_computed_tokens_np = counts if shared else counts.copy()
        self.input_buffers = SimpleNamespace(seq_lens_cpu=Tensor(np.full(4, 77, np.int32)))
        self.upstream_calls = 0
        self.copies = 0

    def _update_seq_lens_cpu(self, scheduler_output: Any, req_ids: list[str]) -> None:
        self.upstream_calls += 1

    def _copy_num_computed_tokens_to_cpu(self) -> None:
        self.copies += 1

    @property
    def seq_lens(self) -> list[int]:
        """The lengths, all rows."""
        return self.input_buffers.seq_lens_cpu.array.tolist()

    @property
    def counts(self) -> list[int]:
        """The counts, all rows."""
        return self.req_states.num_computed_tokens_cpu.array.tolist()


def output(tokens: dict[str, int], counts: dict[str, int], **changes: Any) -> Any:
    """Return a `SchedulerOutput` in which all requests are cached, unless told otherwise."""
    made = SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(counts),
            num_computed_tokens=list(counts.values()),
            resumed_req_ids=changes.pop("resumed_req_ids", set()),
        ),
        finished_req_ids=set(),
        preempted_req_ids=None,
    )
    vars(made).update(changes)
    return made


def make_pass(variant: str = "waits") -> SyncElision:
    """Return the pass as the framework has it on a release of that kind."""
    instance = SyncElision()
    instance.variants = {UPDATE: variant}
    return instance


def step(instance: SyncElision, runner: Runner, scheduled: Any, req_ids: list[str]) -> None:
    """Call the pass as its wrapper does; vLLM has updated its mirror by then."""
    cached = scheduled.scheduled_cached_reqs
    if hasattr(runner.req_states, "num_computed_tokens_np"):
        for req_id, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            row = runner.req_states.req_id_to_index[req_id]
            runner.req_states.num_computed_tokens_np[row] = count
    instance.update_seq_lens(runner._update_seq_lens_cpu, runner, (scheduled, req_ids), {})


DECODE = {"a": 1, "b": 1, "c": 1}


class TestLengths:
    """What is written, and when the rows of the last batch serve again."""

    def test_any_batch_is_counts_plus_tokens_in_batch_order(self) -> None:
        """Row i of the lengths is request i's count and tokens; rows beyond the batch stay."""
        runner = Runner()
        step(make_pass(), runner, output({"c": 5, "a": 1}, {"a": 11, "c": 31}), ["a", "c"])
        assert runner.seq_lens == [12, 36, 77, 77]
        assert runner.counts == [90, 20, 31, 11]

    @pytest.mark.parametrize("req_ids", [["a", "b"], ["b", "a"]])
    def test_the_batch_has_an_order_of_its_own(self, req_ids: list[str]) -> None:
        """Upstream sorts the batch; the scheduler's list of cached requests is in another order."""
        runner = Runner()
        step(make_pass(), runner, output({"a": 1, "b": 5}, {"b": 21, "a": 11}), req_ids)
        assert runner.seq_lens[:2] == [{"a": 12, "b": 26}[req_id] for req_id in req_ids]

        runner = Runner()
        step(make_pass(), runner, output({"a": 1, "b": 5}, {"a": 11, "b": 21}), req_ids)
        assert runner.seq_lens[:2] == [{"a": 12, "b": 26}[req_id] for req_id in req_ids]

    def test_an_empty_batch_writes_nothing(self) -> None:
        """Not even as the first."""
        runner, instance = Runner(), make_pass()
        step(instance, runner, output({}, {}), [])
        assert (runner.seq_lens, runner.counts) == ([77] * 4, [90, 20, 30, 10])
        assert instance.counters["rows_kept"] == 0

    def test_a_new_request_keeps_the_count_it_was_added_with(self) -> None:
        """Only cached requests' counts come from the scheduler's list."""
        runner = Runner()
        scheduled = output({"a": 1, "b": 7}, {"a": 11}, scheduled_new_reqs=[object()])
        step(make_pass(), runner, scheduled, ["a", "b"])
        assert runner.seq_lens == [12, 27, 77, 77]

    @pytest.mark.parametrize("variant", ["waits", "mirrors", "shares"])
    def test_steady_decode_keeps_rows(self, variant: str) -> None:
        """Same batch, one token each: rows are kept, and counts and lengths move on."""
        runner, instance = Runner(shared=variant == "shares"), make_pass(variant)
        for i in range(4):
            counts = {"a": 10 + i, "b": 20 + i, "c": 30 + i}
            step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
            assert runner.seq_lens == [11 + i, 21 + i, 31 + i, 77]
            assert runner.counts == [90, 20 + i, 30 + i, 10 + i]
        assert instance.counters["rows_kept"] == 3
        assert instance.counters["steps"] == instance.counters["held"] == 4
        assert instance.counters["waits_elided"] == (4 if variant == "waits" else 0)
        assert runner.upstream_calls == 0

    @pytest.mark.parametrize(
        "change",
        [
            {"scheduled_new_reqs": [object()]},
            {"finished_req_ids": {"z"}},
            {"preempted_req_ids": {"z"}},
            {"resumed_req_ids": {"a"}},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_rows_are_looked_up_again_after_any_change(self, change: dict[str, Any]) -> None:
        """An equal list of ids is not enough: the requests may have come back on other rows."""
        runner, instance = Runner(), make_pass()
        counts = {"a": 10, "b": 20, "c": 30}
        step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
        runner.req_states.req_id_to_index |= {"a": 1, "b": 3}
        step(instance, runner, output(DECODE, counts, **change), ["a", "b", "c"])
        assert instance.counters["rows_kept"] == 0
        assert runner.counts == [90, 10, 30, 20]
        assert runner.seq_lens == [11, 21, 31, 77]

    def test_another_order_or_number_of_tokens_is_another_batch(self) -> None:
        """Reordered, more tokens, fewer requests: each is filled from scratch."""
        runner, instance = Runner(), make_pass()
        counts = {"a": 10, "b": 20, "c": 30}
        step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
        step(instance, runner, output(DECODE, counts), ["b", "a", "c"])
        assert runner.seq_lens == [21, 11, 31, 77]
        step(instance, runner, output(DECODE | {"c": 2}, counts), ["b", "a", "c"])
        assert runner.seq_lens == [21, 11, 32, 77]
        step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
        assert runner.seq_lens == [11, 21, 31, 77]
        step(instance, runner, output({"b": 1}, {"b": 21}), ["b"])
        assert runner.seq_lens == [22, 21, 31, 77]
        assert instance.counters["rows_kept"] == 0

    def test_a_dummy_run_in_between_does_not_matter(self) -> None:
        """Whatever wrote over the lengths, the next step writes all of the batch's rows."""
        runner, instance = Runner(), make_pass()
        for _ in range(2):
            step(instance, runner, output(DECODE, {"a": 10, "b": 20, "c": 30}), ["a", "b", "c"])
            assert runner.seq_lens[:3] == [11, 21, 31]
            runner.input_buffers.seq_lens_cpu.array[:] = 1
        assert instance.counters["rows_kept"] == 1

    @pytest.mark.parametrize("name", ["num_computed_tokens_cpu", "num_computed_tokens_np"])
    def test_new_buffers_are_noticed(self, name: str) -> None:
        """State is bound to the buffers it was read from, not to a runner."""
        runner, instance = Runner(), make_pass()
        counts = {"a": 10, "b": 20, "c": 30}
        step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
        fresh = np.zeros(4, np.int32)
        setattr(runner.req_states, name, fresh if name.endswith("np") else Tensor(fresh))
        step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
        assert instance.counters["rows_kept"] == 0
        assert fresh.tolist() == [0, 20, 30, 10]

    def test_a_new_buffer_of_lengths_is_noticed(self) -> None:
        """What the attention reads is what is written."""
        runner, instance = Runner(), make_pass()
        counts = {"a": 10, "b": 20, "c": 30}
        step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
        runner.input_buffers.seq_lens_cpu = Tensor(np.zeros(4, np.int32))
        step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
        assert runner.seq_lens == [11, 21, 31, 0]

    def test_two_runners_do_not_mix(self) -> None:
        """Two engines in one process take turns."""
        one, other, instance = Runner(), Runner(), make_pass()
        other.req_states.req_id_to_index = {"a": 0, "b": 2, "c": 1}
        for runner in (one, other, one, other):
            step(instance, runner, output(DECODE, {"a": 10, "b": 20, "c": 30}), ["a", "b", "c"])
            assert runner.seq_lens == [11, 21, 31, 77]
        assert one.counts == [90, 20, 30, 10]
        assert other.counts == [10, 30, 20, 10]

    @pytest.mark.parametrize("counts", [(40, 50, 60), (4, 5, 6)], ids=["behind", "ahead"])
    def test_the_scheduler_wins_over_a_mirror_that_disagrees(self, counts: Any) -> None:
        """Where upstream waits, a mirror is used only while it is what the scheduler sent."""
        runner, instance = Runner(), make_pass()
        for _ in range(3):
            args = (output(DECODE, dict(zip("abc", counts, strict=True))), ["a", "b", "c"])
            instance.update_seq_lens(None, runner, args, {})
            assert runner.seq_lens == [*(count + 1 for count in counts), 77]
        assert instance.counters["rows_kept"] == 0

    def test_without_a_mirror_every_batch_is_filled_from_the_scheduler(self) -> None:
        """VLLM before 0.20."""
        runner, instance = Runner(mirror=False), make_pass()
        new = output(DECODE, {}, scheduled_new_reqs=[object()] * 3)
        step(instance, runner, new, ["a", "b", "c"])
        for i in range(3):
            counts = {"a": 10 + i, "b": 20 + i, "c": 30 + i}
            step(instance, runner, output(DECODE, counts), ["a", "b", "c"])
            assert runner.seq_lens == [11 + i, 21 + i, 31 + i, 77]

    def test_arguments_by_name(self) -> None:
        """Upstream may call its method with keywords."""
        runner = Runner()
        named = {"scheduler_output": output({"a": 1}, {"a": 10}), "req_ids": ["a"]}
        make_pass().update_seq_lens(None, runner, (), named)
        assert runner.seq_lens == [11, 77, 77, 77]

    def test_a_mirror_that_was_never_compared_is_not_read(self) -> None:
        """A batch of new requests alone says nothing about the mirror, so it is not kept."""
        runner, instance = Runner(), make_pass()
        new = output(DECODE, {}, scheduled_new_reqs=[object()] * 3)
        instance.update_seq_lens(None, runner, (new, ["a", "b", "c"]), {})
        args = (output(DECODE, {"a": 40, "b": 50, "c": 60}), ["a", "b", "c"])
        instance.update_seq_lens(None, runner, args, {})
        assert runner.seq_lens == [41, 51, 61, 77]
        assert instance.counters["rows_kept"] == 0


class TestGates:
    """When upstream is left to do its own work."""

    def test_a_diffusion_model_is_refused(self) -> None:
        """It rejects tokens without a speculator."""
        config = SimpleNamespace(diffusion_config=object())
        assert NoDiffusion().unmet(config, None) == "the model is a diffusion language model"
        assert NoDiffusion().unmet(SimpleNamespace(diffusion_config=None), None) is None
        assert NoDiffusion().unmet(SimpleNamespace(), None) is None

    @pytest.mark.parametrize(
        ("attribute", "value"),
        [("speculator", object()), ("speculative_config", object()), ("num_speculative_steps", 8)],
    )
    def test_a_runner_that_may_reject_tokens_is_left_to_upstream(
        self, attribute: str, value: Any
    ) -> None:
        """Also on a pipeline rank without a speculator, and for diffusion models."""
        runner, instance = Runner(), make_pass()
        step(instance, runner, output({"a": 1}, {"a": 10}), ["a"])
        setattr(runner, attribute, value)
        step(instance, runner, output({"a": 1}, {"a": 11}), ["a"])
        instance.copy_num_computed_tokens(runner._copy_num_computed_tokens_to_cpu, runner, (), {})
        assert (runner.upstream_calls, runner.copies) == (1, 1)
        assert instance.counters["steps"] == 2
        assert instance.counters["held"] == 1

    def test_the_copy_is_elided_only_for_a_runner_whose_lengths_we_fill(self) -> None:
        """A subclass with a method of its own reads the copy."""
        ours, theirs, instance = Runner(), Runner(), make_pass()
        step(instance, ours, output({"a": 1}, {"a": 10}), ["a"])
        for runner in (ours, theirs):
            copy = runner._copy_num_computed_tokens_to_cpu
            instance.copy_num_computed_tokens(copy, runner, (), {})
        assert (ours.copies, theirs.copies) == (0, 1)
        assert instance.counters["copies_elided"] == 1

    @pytest.mark.parametrize("variant", ["mirrors", "shares"])
    def test_where_upstream_elides_the_copy_is_upstreams(self, variant: str) -> None:
        """There the method is called only by those who need it."""
        runner, instance = Runner(shared=variant == "shares"), make_pass(variant)
        step(instance, runner, output({"a": 1}, {"a": 10}), ["a"])
        instance.copy_num_computed_tokens(runner._copy_num_computed_tokens_to_cpu, runner, (), {})
        assert runner.copies == 1

    @pytest.mark.parametrize("off", [SyncElision.reverted, lambda p: p.fail("planted")])
    def test_going_off_makes_the_copy_that_was_left_out(self, off: Any) -> None:
        """Upstream's next step would otherwise read counts of long ago; one copy is enough."""
        runner, instance = Runner(), make_pass()
        for count in (10, 11):
            step(instance, runner, output({"a": 1}, {"a": count}), ["a"])
            copy = runner._copy_num_computed_tokens_to_cpu
            instance.copy_num_computed_tokens(copy, runner, (), {})
        assert runner.copies == 0
        off(instance)
        off(instance)
        assert runner.copies == 1

    def test_the_runner_is_not_kept_alive(self) -> None:
        """Its device memory goes when the engine goes."""
        runner, instance = Runner(), make_pass()
        step(instance, runner, output({"a": 1}, {"a": 10}), ["a"])
        instance.copy_num_computed_tokens(None, runner, (), {})
        gone = weakref.ref(runner)
        buffers = weakref.ref(runner.req_states.num_computed_tokens_cpu)
        del runner
        gc.collect()
        assert gone() is None
        assert buffers() is not None, "only the small buffers on the host are held"
        instance.reverted()


class Upstream:
    """Model Runner V2's own method on a `Runner`, with a device whose counts are copied."""

    def __init__(self, runner: Runner, waits: bool = True) -> None:
        self.runner = runner
        self.device = [90, 20, 30, 10]
        self.copied = list(self.device)
        self.waits = waits

    def update(self, scheduled: Any, req_ids: list[str]) -> None:
        """Fill the lengths one by one, from the copied counts."""
        counts = self.runner.req_states.num_computed_tokens_cpu.array
        rows = self.runner.req_states.req_id_to_index
        for req_id in scheduled.scheduled_cached_reqs.req_ids if self.waits else ():
            counts[rows[req_id]] = self.copied[rows[req_id]]
        for i, req_id in enumerate(req_ids):
            tokens = scheduled.num_scheduled_tokens[req_id]
            self.runner.input_buffers.seq_lens_cpu.array[i] = counts[rows[req_id]] + tokens

    def step(
        self,
        instance: SyncElision,
        tokens: dict[str, int],
        copy: bool = True,
        wrong: int = 0,
        of: str = "a",
    ) -> None:
        """Run a step in shadow mode, in which the scheduler's count of `of` is off by `wrong`."""
        rows = self.runner.req_states.req_id_to_index
        counts = {r: self.device[rows[r]] + wrong * (r == of) for r in tokens}
        scheduled = output(tokens, counts)
        if hasattr(self.runner.req_states, "num_computed_tokens_np"):
            for req_id, count in counts.items():
                self.runner.req_states.num_computed_tokens_np[rows[req_id]] = count
        self._shadow(instance, UPDATE, self.update, scheduled, list(tokens))
        for req_id, count in tokens.items():
            self.device[rows[req_id]] += count
        if copy:
            self._shadow(instance, COPY, lambda: self.copied.__setitem__(slice(None), self.device))

    def _shadow(self, instance: SyncElision, target: str, upstream: Any, *args: Any) -> None:
        patch = next(patch for patch in instance.patches if str(patch.target) == target)
        assert patch.shadow is not None
        shadowing(instance, patch, getattr(instance, patch.shadow))(upstream, self.runner, args, {})


class TestShadow:
    """What is compared while upstream does the work."""

    @pytest.mark.parametrize("variant", ["waits", "mirrors", "shares"])
    def test_every_step_is_compared_steady_ones_too(self, variant: str) -> None:
        """Upstream fills the buffers, the pass says the same, and has elided nothing."""
        runner, instance = Runner(shared=variant == "shares"), make_pass(variant)
        upstream = Upstream(runner, waits=variant == "waits")
        if variant == "mirrors":  # that release's gate copies the counts from the mirror
            counts = runner.req_states
            counts.num_computed_tokens_np = counts.num_computed_tokens_cpu.array
        for i in range(4):
            upstream.step(instance, DECODE)
            assert runner.seq_lens == [11 + i, 21 + i, 31 + i, 77]
        upstream.step(instance, {"b": 3})
        counters = {"steps": 5, "held": 5, "rows_kept": 3, "compared": 5}
        assert (dict(instance.counters), instance.failure) == (counters, None)

    @pytest.mark.parametrize("steady", [0, 3])
    def test_a_count_that_differs_from_the_devices_is_named(self, steady: int) -> None:
        """Request, row, the device's count and the scheduler's; upstream's values stay."""
        runner, instance = Runner(), make_pass()
        upstream = Upstream(runner)
        for _ in range(steady):
            upstream.step(instance, DECODE)
        upstream.step(instance, DECODE, wrong=1)
        assert instance.failure == (
            "in shadow, it differs from the original: "
            f"num_computed_tokens (1 of 4 values): a [3] expected {10 + steady}, "
            f"found {11 + steady}; seq_lens (1 of 4 values): a [0] expected {11 + steady}, "
            f"found {12 + steady}"
        )
        assert runner.seq_lens == [11 + steady, 21 + steady, 31 + steady, 77]
        assert runner.counts == [90, 20 + steady, 30 + steady, 10 + steady]

    @pytest.mark.parametrize(("req_id", "row", "count"), [("a", 3, 10), ("b", 1, 20), ("c", 2, 30)])
    def test_the_request_whose_count_differs_is_named(
        self, req_id: str, row: int, count: int
    ) -> None:
        """By the row that it holds, whichever request that is."""
        runner, instance = Runner(), make_pass()
        Upstream(runner).step(instance, DECODE, wrong=1, of=req_id)
        assert f"{req_id} [{row}] expected {count}, found {count + 1}" in (instance.failure or "")

    @pytest.mark.parametrize("row", [0, 3])
    def test_rows_that_the_pass_must_not_touch_are_compared(
        self, row: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A write to a free row, or to the padding behind the batch, is a difference."""
        runner, instance = Runner(), make_pass()
        fill = _Lengths.fill

        def touch(lengths: Any, *args: Any) -> bool:
            (lengths._counts if row == 0 else lengths._seq_lens)[row] = 5
            return fill(lengths, *args)

        monkeypatch.setattr(_Lengths, "fill", touch)
        Upstream(runner).step(instance, {"a": 1, "b": 1})
        name = "a free row [0] expected 90" if row == 0 else "padding [3] expected 77"
        assert f"{name}, found 5" in (instance.failure or "")

    def test_a_step_without_a_copy_is_no_measure(self) -> None:
        """Upstream itself reads old counts after it; the next step is compared again."""
        runner, instance = Runner(), make_pass()
        upstream = Upstream(runner)
        for copy in (True, False, True, True):
            upstream.step(instance, DECODE, copy=copy)
        assert (instance.counters["steps"], instance.counters["compared"]) == (4, 3)
        assert instance.failure is None

    def test_a_runner_that_may_reject_tokens_is_not_compared(self) -> None:
        """The pass would do nothing for it."""
        runner, instance = Runner(), make_pass()
        runner.speculative_config = object()
        Upstream(runner).step(instance, DECODE, wrong=1)
        assert (dict(instance.counters), instance.failure) == ({"steps": 1}, None)

    @pytest.mark.parametrize("off", [SyncElision.reverted, lambda p: p.fail("planted")])
    def test_leaving_shadow_mode_copies_nothing(self, off: Any) -> None:
        """No copy was left out, so none is missing."""
        runner, instance = Runner(), make_pass()
        upstream = Upstream(runner)
        for _ in range(2):
            upstream.step(instance, DECODE)
        off(instance)
        assert runner.copies == 0

    def test_new_buffers_are_noticed_in_shadow_mode(self) -> None:
        """Two engines in one process take turns."""
        one, other, instance = Upstream(Runner()), Upstream(Runner()), make_pass()
        for upstream in (one, other, one, other):
            upstream.step(instance, DECODE)
        assert (instance.counters["compared"], instance.failure) == (4, None)


@pytest.mark.parametrize("variant", ["waits", "mirrors", "shares"])
def test_the_status_says_whether_the_wait_is_elided(variant: str) -> None:
    """On a release that elides it itself, the pass takes no credit for it."""
    said = make_pass(variant).applied()
    assert said.startswith("elides the copy and the wait") == (variant == "waits")
    assert ("this release elides the wait itself" in said) == (variant != "waits")


def test_importing_the_pass_imports_no_array_library() -> None:
    """`list-passes` and every vLLM process import it."""
    code = (
        "import sys, ascend_opt_passes.sync_elision;"
        "sys.exit(bool({'numpy', 'torch', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
