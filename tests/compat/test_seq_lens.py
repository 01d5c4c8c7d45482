"""The real length methods of real releases, side by side with the pass, over random traffic."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ascend_opt.patching import Applied
from ascend_opt.states import Mode
from ascend_opt_passes import sync_elision
from ascend_opt_passes.sync_elision import SyncElision
from compat.light import GPUModelRunner, Scheduled, Scheduler, fake_device, installed, load
from compat.patching import patch

MAX_NUM_REQS = 6
IDS = "abcdefgh"
EVENTS = ("_arrive", "_finish", "_preempt", "_reorder")
BUFFERS = (
    ("input_buffers", "seq_lens_np"),
    ("input_buffers", "seq_lens_cpu"),
    ("req_states", "num_computed_tokens_cpu"),
    ("req_states", "num_computed_tokens_np"),
)
# One of each kind: copy inside postprocess; copy in its own method; mirror; shared; last gate.
KINDS = ("0.18.0", "0.21.0rc1", "0.26.0rc1", "0.27.1rc1", "0.28.0rc1", "0.30.0rc2")
WAITING = KINDS[:3]
SETTINGS = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


class Broken:
    """Stands for whatever may be wrong with us one day."""

    def belongs_to(self, *buffers: Any) -> bool:
        """Fail."""
        raise RuntimeError("planted")


class Traffic(RuleBasedStateMachine):
    """Two runners of one release under one scheduler: upstream's, and one with the pass."""

    version: ClassVar[str]
    pass_class: ClassVar[type[SyncElision]] = SyncElision
    mode: ClassVar[Mode] = Mode.ACTIVE
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.stack.enter_context(fake_device())
        self.release = load(self.version)
        self.stack.enter_context(installed(self.release))
        self.upstream = load(self.version).runner(MAX_NUM_REQS)
        self.patched = self.release.runner(MAX_NUM_REQS)
        self.scheduler = Scheduler()
        self.instance: SyncElision | None = None
        self.applied: list[Applied] = []
        self.broken = False

    @initialize(
        enabled=st.sampled_from([True, True, False]),
        prompts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    )
    def start(self, enabled: bool, prompts: list[int]) -> None:
        """The engine starts, with the pass or without it, and prefills some requests."""
        if enabled:
            self._switch_on()
        self.scheduler.waiting = {r: Scheduled(n) for r, n in zip(IDS, prompts, strict=False)}
        admitted = {r: (0, request.num_tokens) for r, request in self.scheduler.waiting.items()}
        self._run(self.scheduler.schedule({}, admitted), 0)

    # --- what happens between steps

    @rule(num_reqs=st.integers(1, MAX_NUM_REQS))
    def dummy_run(self, num_reqs: int) -> None:
        """A dummy batch writes over the lengths."""
        self.upstream.dummy_run(num_reqs)
        self.patched.dummy_run(num_reqs)

    @rule(breaks=st.booleans())
    def switch(self, breaks: bool) -> None:
        """The pass is switched on or off while the engine runs, or is going to fail."""
        if self.instance is None:
            self._switch_on()
        elif self.instance.failure is not None:
            self._switch_off()
            self._switch_on()
        elif breaks:
            self.instance._lengths = self.instance._compared = Broken()
            self.broken = True
        else:
            self._switch_off()

    def _switch_on(self) -> None:
        self.instance, self.broken = self.pass_class(), False
        self.applied = patch(self.release, self.instance, self.mode)

    def _switch_off(self) -> None:
        for applied in self.applied:
            applied.revert()
        self.instance.reverted()
        self.seen.update(self.instance.counters)
        self.seen["failed"] += self.instance.failure is not None
        self.instance = None

    # --- steps

    @rule(data=st.data(), padding=st.integers(0, 3))
    def step(self, data: st.DataObject, padding: int) -> None:
        """A mixed step after arrivals, finishes, preemptions and changes of order.

        Chunks of prefill, decodes, requests left out, requests admitted with prefix hits.
        """
        for event in data.draw(st.lists(st.sampled_from(EVENTS), max_size=4)):
            getattr(self, event)(data)
        tokens = {}
        for req_id, request in self.scheduler.running.items():
            left = request.num_tokens - request.num_computed
            count = data.draw(st.sampled_from([left, 1, 0, max(1, left // 2)]))
            if count:
                tokens[req_id] = count
        self._run(self.scheduler.schedule(tokens, self._admit(data)), padding)

    def _arrive(self, data: st.DataObject) -> None:
        """The id of a request that has finished may come again."""
        unused = [r for r in IDS if r not in self.scheduler.running | self.scheduler.waiting]
        req_id = data.draw(st.sampled_from(unused)) if unused else None
        if req_id is not None:
            self.scheduler.waiting[req_id] = Scheduled(data.draw(st.integers(1, 9)))

    def _finish(self, data: st.DataObject) -> None:
        if self.scheduler.running:
            self.scheduler.finish(data.draw(st.sampled_from(list(self.scheduler.running))))

    def _preempt(self, data: st.DataObject) -> None:
        if self.scheduler.running:
            self.scheduler.preempt(data.draw(st.sampled_from(list(self.scheduler.running))))

    def _reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(list(self.scheduler.running)))
        self.scheduler.running = {r: self.scheduler.running[r] for r in order}

    @precondition(lambda self: self.scheduler.running)
    @rule(steps=st.integers(1, 6), padding=st.integers(0, 3))
    def decode(self, steps: int, padding: int) -> None:
        """Steady decode: the same requests, one token each."""
        for _ in range(steps):
            self._run(
                self.scheduler.schedule(dict.fromkeys(self.scheduler.running, 1), {}), padding
            )

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """All are preempted and resumed by prefix hits: the same ids in the batch, other rows."""
        running = list(self.scheduler.running)
        for req_id in running:
            self.scheduler.preempt(req_id)
        waiting = self.scheduler.waiting
        order = data.draw(st.sampled_from([running, running[::-1]]))
        self._run(
            self.scheduler.schedule({}, {r: (waiting[r].num_tokens - 1, 1) for r in order}), 0
        )

    @rule()
    def idle(self) -> None:
        """A step with nothing to run still tells the runner who is gone."""
        self._run(self.scheduler.schedule({}, {}), 0)

    def _admit(self, data: st.DataObject) -> dict[str, tuple[int, int]]:
        admitted = {}
        room = MAX_NUM_REQS - len(self.scheduler.running)
        for req_id in list(self.scheduler.waiting)[:room]:
            if data.draw(st.sampled_from([True, True, False])):
                num_tokens = self.scheduler.waiting[req_id].num_tokens
                hit = data.draw(st.sampled_from([0, num_tokens - 1, num_tokens // 2]))
                left = num_tokens - hit
                admitted[req_id] = (hit, data.draw(st.sampled_from([left, 1])))
        return admitted

    def _run(self, output: Any, padding: int) -> None:
        """Run one step on both runners."""
        orders = []
        waits, copies = self._device_work()
        for runner in (self.upstream, self.patched):
            runner.update_states(output)
            if output.total_num_scheduled_tokens:
                padded = min(MAX_NUM_REQS, len(output.num_scheduled_tokens) + padding)
                orders.append(runner.prepare(output, padded))
        self.buffers_are_equal()
        for runner, order in zip((self.upstream, self.patched), orders, strict=False):
            runner.finish_step(output, order)
        if type(self.instance) is not SyncElision:
            return
        assert self.broken or self.instance.failure is None, self.instance.failure
        if self.mode is Mode.SHADOW:
            ours, theirs = self._device_work(), self._device_work(self.upstream)
            assert ours == theirs, "the device's work differs from upstream's"
        elif self.instance.failure is None:
            assert self._device_work() == (waits, copies), "the host waited or copied"

    def _device_work(self, runner: Any = None) -> tuple[int, int]:
        runner = runner or self.patched
        return runner.num_computed_tokens_event.waits, runner.num_computed_tokens_cpu.copies

    # --- what must hold

    @invariant()
    def buffers_are_equal(self) -> None:
        """Every length buffer is bit-equal over all its rows, padding and free rows included."""
        for part, name in BUFFERS:
            upstream = getattr(getattr(self.upstream, part), name, None)
            if upstream is None:
                continue
            patched = getattr(getattr(self.patched, part), name)
            ours, theirs = np.asarray(patched).tolist(), np.asarray(upstream).tolist()
            assert ours == theirs, f"{name} differs"

    @invariant()
    def traffic_is_sound(self) -> None:
        """The device's counts are the scheduler's: the machine models no speculation."""
        states = self.upstream.req_states
        for req_id, row in states.req_id_to_index.items():
            if req_id in self.scheduler.running:
                counted = self.scheduler.running[req_id].num_computed
                assert states.num_computed_tokens.gpu[row] == counted

    def teardown(self) -> None:
        """Collect the counters and take the fakes out."""
        if self.instance is not None:
            self._switch_off()
        self.stack.close()


def traffic(
    version: str, pass_class: type[SyncElision] = SyncElision, mode: Mode = Mode.ACTIVE
) -> type[Traffic]:
    """Return the machine for one release and one pass."""
    body = {"version": version, "pass_class": pass_class, "mode": mode, "seen": Counter()}
    return type("Traffic", (Traffic,), body)


@pytest.mark.parametrize("version", KINDS)
def test_lengths_are_bit_equal_to_the_real_method(version: str) -> None:
    """Over random traffic each buffer equals upstream's, with no wait and no copy of ours."""
    machine = traffic(version)
    run_state_machine_as_test(machine, settings=SETTINGS)
    # 0.18.0 lacks the mirror of the scheduler's counts that steady decode reads.
    assert (machine.seen["rows_kept"] > 0) == (version != "0.18.0")
    assert machine.seen["steps"] > machine.seen["rows_kept"]
    assert (machine.seen["waits_elided"] > 0) == (version in WAITING)
    assert (machine.seen["copies_elided"] > 0) == (version in WAITING)


@pytest.mark.parametrize("version", KINDS)
def test_in_shadow_mode_every_step_is_compared_and_equal(version: str) -> None:
    """Over random traffic: upstream's device work, no difference, steady decode included."""
    machine = traffic(version, mode=Mode.SHADOW)
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=15))
    seen = machine.seen
    assert seen["held"] == seen["steps"] > seen["rows_kept"]
    assert seen["compared"] == seen["steps"] - seen["failed"]  # by the planted error
    assert (seen["rows_kept"] > 0) == (version != "0.18.0")
    assert seen["waits_elided"] == seen["copies_elided"] == 0


def test_an_error_of_vllms_own_is_not_answered_by_a_second_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 0.20.2rc1 the original advances the counts as well: it is not called after ours."""
    calls = []

    def postprocess(runner: Any, *batch: Any) -> None:
        calls.append(batch)
        raise RuntimeError("of vLLM")

    monkeypatch.setattr(GPUModelRunner, "postprocess", postprocess)
    with fake_device(), installed(release := load("0.18.0")):
        patch(release, SyncElision())
        runner, scheduler = release.runner(MAX_NUM_REQS), Scheduler(waiting={"a": Scheduled(5)})
        output = scheduler.schedule({}, {"a": (0, 5)})
        runner.update_states(output)
        req_ids = runner.prepare(output, 1)
        with pytest.raises(RuntimeError, match="of vLLM"):
            runner.finish_step(output, req_ids)
    assert len(calls) == 1


class ReadsTheOldBuffer(SyncElision):
    """Skips the wait and reads the host's buffer all the same."""

    _waits = False  # leaves the copies in

    def update_seq_lens(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        """Call upstream's method with an event that does not wait."""
        event = runner.num_computed_tokens_event
        runner.num_computed_tokens_event = SimpleNamespace(synchronize=lambda: None)
        try:
            return wrapped(*args, **kwargs)
        finally:
            runner.num_computed_tokens_event = event

    # The mark of `host_patch`: an override without it would take the patch out.
    vars(update_seq_lens).update(vars(SyncElision.update_seq_lens))


class LeavesNoCopy(SyncElision):
    """Goes off without the copy that upstream's next step reads."""

    def reverted(self) -> None:
        """Forget the copy."""
        self._lengths = None


def equal_ids_are_enough(self: Any, output: Any, req_ids: list[str]) -> bool:
    """Keep the rows of a batch that has the same ids, whatever happened to them."""
    return output.total_num_scheduled_tokens == self._num_reqs > 0 and req_ids == self._req_ids


class TestTheMachineCatches:
    """Each planted fault must fail the machine that the pass has to pass."""

    @pytest.mark.parametrize("version", WAITING)
    @pytest.mark.parametrize("wrong", [ReadsTheOldBuffer, LeavesNoCopy])
    def test_stale_counts(self, version: str, wrong: type[SyncElision]) -> None:
        """Old counts are seen, since the fake device delivers a copy only to who waits."""
        with pytest.raises(AssertionError, match="differs"):
            run_state_machine_as_test(traffic(version, wrong), settings=_planted())

    @pytest.mark.parametrize("version", ["0.26.0rc1", "0.30.0rc2"])
    def test_rows_kept_on_an_equal_list_of_ids(
        self, version: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request that came back on another row is seen."""
        monkeypatch.setattr(sync_elision._Lengths, "_same_batch", equal_ids_are_enough)
        with pytest.raises(AssertionError, match="differs"):
            run_state_machine_as_test(traffic(version), settings=_planted())

    @pytest.mark.parametrize("version", ["0.26.0rc1", "0.30.0rc2"])
    def test_shadow_mode_catches_it_too(
        self, version: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The comparison fails the pass, before any value of it is used."""
        monkeypatch.setattr(sync_elision._Lengths, "_same_batch", equal_ids_are_enough)
        with pytest.raises(AssertionError, match="in shadow, it differs from the original"):
            run_state_machine_as_test(traffic(version, mode=Mode.SHADOW), settings=_planted())


def _planted() -> settings:
    # Found within a few examples; shrinking and the blob would only cost time.
    return settings(
        SETTINGS, max_examples=400, phases=[Phase.generate], print_blob=False, database=None
    )
