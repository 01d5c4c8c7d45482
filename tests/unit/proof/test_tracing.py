"""Traces of a model runner that counts, with torch's profiler."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ascend_opt.cli import main
from ascend_opt.proof import tracing
from ascend_opt.proof.tracing import Tracer, WorkerTracer, merge

Invoke = Callable[..., Result]
pytest_plugins = ("light",)

TARGET = f"{__name__}:Runner.prepare"
PREPARE = "ascend_opt: saver: Runner.prepare"


class Runner:
    """Has the method that a step begins with, and one that a pass would patch."""

    def execute_model(self, scheduler_output: Any) -> int:
        return self.prepare(len(scheduler_output.num_scheduled_tokens))

    def prepare(self, num_requests: int) -> int:
        return num_requests


PREPARE_AS_IT_IS = Runner.prepare


def batch(*tokens: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens={str(i): n for i, n in enumerate(tokens)})


def untouched(runner: Runner) -> bool:
    return not vars(runner) and Runner.prepare is PREPARE_AS_IT_IS


def test_only_decode_steps_are_traced_and_marked() -> None:
    """The second decode step is the first one in the trace; afterwards nothing is left behind."""
    runner = Runner()
    tracer = Tracer(runner, {TARGET: "saver"}, {}, steps=2)
    results = [runner.execute_model(b) for b in (batch(8, 4), batch(1, 9), *[batch(1, 1)] * 5)]
    assert results == [2] * 7
    assert untouched(runner)
    tracer.end()
    assert (tracer.steps, tracer.problem) == (2, None)
    marks = [e for e in tracer.events if e["name"].startswith("ascend_opt")]
    assert Counter(e["name"] for e in marks) == {
        "ascend_opt: step 1": 1,
        "ascend_opt: step 2": 1,
        PREPARE: 2,
    }
    for step in (e for e in marks if "step" in e["name"]):
        inside = [e for e in marks if e["name"] == PREPARE and tracing._encloses(step, e)]
        assert len(inside) == 1


def test_a_step_says_what_was_counted_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The effect stands in its name, and every counter that moved in its arguments."""
    runner = Runner()
    counts = iter([3, 11, 11, 19])

    def status() -> list[Any]:
        return [SimpleNamespace(name="p", counters={"prefetches": next(counts), "captured": 4})]

    monkeypatch.setattr("ascend_opt.control.status", status)
    tracer = Tracer(runner, {}, {"p": "prefetches"}, steps=2)
    for _ in range(5):
        runner.execute_model(batch(1))
    steps = [e for e in tracer.events if e["name"].startswith("ascend_opt")]
    assert [e["name"] for e in steps] == [
        "ascend_opt: step 1: p prefetches +8",
        "ascend_opt: step 2: p prefetches +8",
    ]
    assert steps[0]["args"]["p"] == {"prefetches": 8}


def test_waits_and_prefetches_of_the_driver_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait counts for the pass in whose method it is; no other one carries a mark."""

    def call(kind: str, at: float, thread: int = 1) -> dict[str, Any]:
        return {"name": kind, "cat": kind, "ph": "i", "pid": 9, "tid": thread, "ts": at, "args": {}}

    class Driver:
        def start(self) -> None:
            pass

        def slice(self, name: str) -> Any:
            return contextlib.nullcontext()

        def stop(self) -> list[dict[str, Any]]:
            method = {**call("ascend_opt", 10.0), "name": PREPARE, "ph": "X", "dur": 5.0}
            waits = [
                call("sync_event", 12.0),
                call("sync_event", 16.0),
                call("sync_event", 12.0, 2),
            ]
            return [method, *waits, call("record_event", 12.0), call("cmo_async", 20.0)]

    def names(effects: dict[str, str]) -> list[str]:
        runner = Runner()
        tracer = Tracer(runner, {TARGET: "saver"}, effects, steps=1)
        for _ in range(4):
            runner.execute_model(batch(1))
        assert tracer.problem is None
        return [event["name"] for event in tracer.events[1:]]

    monkeypatch.setattr("ascend_opt.proof.tracing.recorder", Driver)
    wait = "ascend_opt: saver: wait"
    unmarked = ["sync_event", "sync_event", "record_event"]
    assert names({}) == [wait, *unmarked, "cmo_async"]  # without a pass: someone else's prefetch
    counts = iter(range(8))
    monkeypatch.setattr(
        "ascend_opt.control.status",
        lambda: [SimpleNamespace(name="p", counters={"prefetches": next(counts)})],
    )
    assert names({"p": "prefetches"}) == [wait, *unmarked, "ascend_opt: prefetch"]


def test_requests_that_end_early_leave_a_shorter_trace(tmp_path: Path) -> None:
    """What there was is kept; a trace without a decode step says what to do."""
    worker = WorkerTracer()
    worker.model_runner, worker.vllm_config = Runner(), SimpleNamespace()
    worker.ascend_opt_begin_trace({TARGET: "saver"}, {})
    for _ in range(3):
        worker.model_runner.execute_model(batch(1))
    path, steps, problem = worker.ascend_opt_end_trace(str(tmp_path))
    assert (steps, problem) == (2, None)
    assert untouched(worker.model_runner)
    merge([path, path], tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert sum(e["name"] == PREPARE for e in events) == 4

    worker.ascend_opt_begin_trace({TARGET: "saver"}, {})
    worker.model_runner.execute_model(batch(8))
    _, steps, problem = worker.ascend_opt_end_trace(str(tmp_path))
    assert steps == 0
    assert "--output-len" in str(problem)
    assert untouched(worker.model_runner)


def test_a_recorder_that_fails_ends_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner goes on as if nothing had been asked, and the reason is kept."""

    class Broken:
        def start(self) -> None:
            raise RuntimeError("profiler is taken")

        def stop(self) -> list[Any]:
            raise RuntimeError("never started")

    monkeypatch.setattr("ascend_opt.proof.tracing.recorder", Broken)
    runner = Runner()
    tracer = Tracer(runner, {TARGET: "saver"}, {})
    assert [runner.execute_model(batch(1)) for _ in range(4)] == [1] * 4
    assert tracer.problem == "RuntimeError: profiler is taken"
    assert untouched(runner)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace=out", "--", "--worker-extension-cls=a.B"), "--worker-extension-cls"),
        (("--trace=taken/out",), "--trace: taken/out"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_an_engine_starts(
    light_vllm: Invoke, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """Exit code 2 with the option that is in the way."""
    (tmp_path / "taken").write_text("")
    result = light_vllm("bench", "--enable=fast", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_host_has_no_trace(tmp_path: Path) -> None:
    """`bench --host` swaps passes step by step in one engine: there is no before and after."""
    trace = str(tmp_path / "out")
    result = CliRunner().invoke(
        main, ["bench", "--host", "--enable=sync-elision", "--trace", trace]
    )
    assert result.exit_code == 2
    assert "--trace does not go with --host" in result.output
