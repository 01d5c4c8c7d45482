"""A few decode steps as a Perfetto trace, with what the passes patch marked; taken in the workers.

On simnpu the trace has every call of the driver, elsewhere what torch's profiler sees. Both arms
of a comparison are marked alike: a slice for each step, and one around each call of a host method
that a pass patches. In the unpatched trace such a slice holds the wait, in the patched one it does
not; what the passes counted in a step stands in the name of its slice.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

import wrapt

from ascend_opt import control
from ascend_opt.targets import Target

PREFIX = "ascend_opt: "
PREFETCH = f"{PREFIX}prefetch"
"""A prefetch of the simulated driver; torch's profiler shows the op, `ascend_opt::prefetch`."""

STEPS = 5
"""Decode steps in a trace."""

_WAITS = ("sync_event", "sync_stream", "sync_device")
_DRIVER_PREFETCH = "cmo_async"

Event = dict[str, Any]
"""One event of the Chrome trace format."""


def step_name(number: int) -> str:
    """Return how the slice of a step begins; what was counted in it follows."""
    return f"{PREFIX}step {number}"


def method_name(pass_name: str, target: str) -> str:
    """Return the name of the slice around calls of a patched method."""
    return f"{PREFIX}{pass_name}: {Target.parse(target).qualname}"


def wait_name(pass_name: str) -> str:
    """Return the name of a host wait in a method that a pass patches."""
    return f"{PREFIX}{pass_name}: wait"


class Recorder(Protocol):
    """Records what this process does between `start` and `stop`."""

    def start(self) -> None:
        """Begin."""

    def slice(self, name: str) -> AbstractContextManager[Any]:
        """Show the body of a `with` as a slice of this thread."""

    def stop(self) -> list[Event]:
        """End, and return what there was."""


class TorchRecorder:
    """torch's profiler."""

    def __init__(self) -> None:
        import torch

        self._profile = torch.profiler.profile()
        self._slice = torch.profiler.record_function

    def start(self) -> None:
        """See `Recorder.start`."""
        self._profile.start()

    def slice(self, name: str) -> AbstractContextManager[Any]:
        """See `Recorder.slice`."""
        made: AbstractContextManager[Any] = self._slice(name)
        return made

    def stop(self) -> list[Event]:
        """See `Recorder.stop`."""
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="ascend_opt-trace-") as directory:
            path = Path(directory, "trace.json")
            self._profile.export_chrome_trace(str(path))
            events: list[Event] = json.loads(path.read_text())["traceEvents"]
        return events


class DriverRecorder:
    """simnpu's own trace, with our slices on the tracks of the threads that made the calls."""

    def __init__(self) -> None:
        from ascend_opt.simnpu import counters

        self._trace_to = counters.trace_to
        self._directory = tempfile.TemporaryDirectory(prefix="ascend_opt-trace-")
        self._slices: list[Event] = []

    def start(self) -> None:
        """See `Recorder.start`."""
        self._trace_to(Path(self._directory.name))

    @contextlib.contextmanager
    def slice(self, name: str) -> Iterator[None]:
        """See `Recorder.slice`."""
        begun = time.monotonic()  # the driver's clock
        try:
            yield
        finally:
            self._slices.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": "ascend_opt",
                    "pid": os.getpid(),
                    "tid": threading.get_native_id(),
                    "ts": begun * 1e6,
                    "dur": (time.monotonic() - begun) * 1e6,
                    "args": {},
                }
            )

    def stop(self) -> list[Event]:
        """See `Recorder.stop`."""
        from ascend_opt.simnpu import trace

        self._trace_to(None)
        events: list[Event] = trace.to_chrome(trace.read(Path(self._directory.name)))["traceEvents"]
        self._directory.cleanup()
        return [*events, *self._slices]


def recorder() -> Recorder:
    """Return what records in this process: simnpu's trace where it is simulated."""
    # What simnpu itself sets: there is no need to load anything to know that it is not there.
    return DriverRecorder() if os.environ.get("SIMNPU") == "1" else TorchRecorder()


class Tracer:
    """Traces the first decode steps of a model runner, from the second one on.

    Args:
        runner: Has `execute_model(scheduler_output, …)`; a step lasts from one call to the next.
        targets: Host method to the pass that patches it.
        effects: Pass to the counter that says it did its work.
        steps: How many.
        most_tokens: Of one request in a decode step.
    """

    def __init__(
        self,
        runner: Any,
        targets: Mapping[str, str],
        effects: Mapping[str, str],
        steps: int = STEPS,
        most_tokens: int = 1,
    ) -> None:
        self.steps = 0
        self.problem: str | None = None
        self.events: list[Event] = []
        self._runner = runner
        self._original: Callable[..., Any] = runner.execute_model
        self._targets = targets
        self._effects = effects
        self._wanted = steps
        self._most_tokens = most_tokens
        self._decoded = 0
        self._recorder: Recorder | None = None
        self._marks = ExitStack()
        self._step = ExitStack()
        self._before: dict[str, dict[str, int]] = {}
        self._gains: dict[str, dict[str, dict[str, int]]] = {}
        runner.execute_model = self._execute_model

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._runner is not None:
            try:
                self._turn(scheduler_output)
            except Exception as error:  # a trace is no reason to end an engine
                self.end(f"{type(error).__name__}: {error}")
        return self._original(scheduler_output, *args, **kwargs)

    def _turn(self, scheduler_output: Any) -> None:
        """End the step so far, and begin the next if it is to be traced."""
        if self._recorder is None:
            counts = scheduler_output.num_scheduled_tokens.values()
            self._decoded += 0 < max(counts, default=0) <= self._most_tokens
            if self._decoded < 2:
                return
            self._recorder = recorder()
            self._recorder.start()
            _mark(self._targets, self._recorder, self._marks)
        else:
            self._end_step()
        if self.steps == self._wanted:
            self.end()
            return
        self._before = _counters()
        self.steps += 1
        self._step.enter_context(self._recorder.slice(step_name(self.steps)))

    def _end_step(self) -> None:
        self._step.close()
        self._gains[step_name(self.steps)] = {
            name: {
                counter: value - self._before.get(name, {}).get(counter, 0)
                for counter, value in counters.items()
                if value != self._before.get(name, {}).get(counter, 0)
            }
            for name, counters in _counters().items()
        }

    def end(self, problem: str | None = None) -> None:
        """Stop, if that was not done, and leave everything as it was found."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        self.problem = problem
        with contextlib.suppress(AttributeError):
            del runner.execute_model
        if self._recorder is None:
            self.problem = problem or "no decode step: generate more tokens (--output-len)"
            return
        try:
            if problem is None and len(self._gains) < self.steps:
                self._end_step()
            self._step.close()
            self._marks.close()
            self.events = self._marked(self._recorder.stop())
        except Exception as error:
            self.problem = problem or f"{type(error).__name__}: {error}"

    def _marked(self, events: list[Event]) -> list[Event]:
        """Say in names of events what they have to do with the passes."""
        methods = {method_name(name, target): name for target, name in self._targets.items()}
        inside = [event for event in events if event["name"] in methods and "dur" in event]
        patched = any(self._gains.values())
        for event in events:
            if event.get("cat") in _WAITS:
                for around in inside:
                    if _encloses(around, event):
                        event["args"]["call"] = event["name"]
                        event["name"] = wait_name(methods[around["name"]])
                        break
            elif event.get("cat") == _DRIVER_PREFETCH and patched:
                event["args"]["call"] = event["name"]
                event["name"] = PREFETCH
            elif event["name"] in self._gains and "dur" in event:
                gains = self._gains[event["name"]]
                event.setdefault("args", {}).update(gains)
                did = [
                    f"{name} {counter} +{gains[name][counter]}"
                    for name, counter in self._effects.items()
                    if gains.get(name, {}).get(counter)
                ]
                event["name"] = ": ".join([event["name"], *filter(None, [", ".join(did)])])
        return events


def _encloses(outer: Event, event: Event) -> bool:
    same = outer["pid"] == event["pid"] and outer["tid"] == event["tid"]
    return bool(same and 0 <= event["ts"] - outer["ts"] <= outer["dur"])


def _mark(targets: Mapping[str, str], recording: Recorder, marks: ExitStack) -> None:
    """Show calls of some methods, whatever stands there, until `marks` is closed."""
    for text, name in targets.items():
        target = Target.parse(text)

        def show(
            wrapped: Any,
            instance: Any,
            args: Any,
            kwargs: Any,
            label: str = method_name(name, text),
        ) -> Any:
            with recording.slice(label):
                return wrapped(*args, **kwargs)

        try:
            module = importlib.import_module(target.module)
            owner, attribute, _ = wrapt.resolve_path(module, target.qualname)
            wrapper = wrapt.wrap_object(owner, attribute, wrapt.FunctionWrapper, (show,))
        except (ImportError, AttributeError):
            continue
        marks.callback(wrapt.unwrap_object, owner, attribute, wrapper)


def _counters() -> dict[str, dict[str, int]]:
    return {status.name: dict(status.counters) for status in control.status() if status.counters}


_tracers: list[Tracer] = []


class WorkerTracer:
    """Mixed into vLLM's worker class; the names are long because they share its namespace."""

    model_runner: Any
    vllm_config: Any

    def ascend_opt_begin_trace(
        self, targets: Mapping[str, str], effects: Mapping[str, str]
    ) -> None:
        """Trace the next decode steps; the arguments are those of `Tracer`."""
        speculative = getattr(self.vllm_config, "speculative_config", None)
        drafts = getattr(speculative, "num_speculative_tokens", 0) or 0
        made = Tracer(self.model_runner, targets, effects, most_tokens=1 + drafts)
        _tracers.append(made)

    def ascend_opt_end_trace(self, directory: str) -> tuple[str, int, str | None]:
        """Return a file in `directory` with the events, how many steps, and what went wrong."""
        tracer = _tracers.pop()
        tracer.end()
        path = Path(directory, f"{os.getpid()}.json")
        path.write_text(json.dumps(tracer.events))
        return str(path), tracer.steps, tracer.problem


def merge(parts: Sequence[str], path: Path) -> None:
    """Write the events of all workers as one trace."""
    events = [event for part in parts for event in json.loads(Path(part).read_text())]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
