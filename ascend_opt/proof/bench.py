"""bench: the passes off and on by turns, in one run, on the same requests.

Two engines live side by side, one without and one with the passes, and take turns: off, on, off,
on, … Whatever slows the machine down for a while slows both arms. A round is one batch of
requests; both arms of a pair get the same prompts, and no two pairs share one, so no prefix cache
helps.

A change of turns disturbs: threads of the engine that has just finished go on spinning for a
while (OpenMP's for 200 ms), and the other has to wake up. So turns are strictly alternating, which
treats both arms alike, and each begins with a pause and a short request that is not measured.

Where the device has no room for two engines they run in turn instead, and are started anew for
each block of rounds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ascend_opt import registry
from ascend_opt.base import Kind
from ascend_opt.errors import NotApplicableError
from ascend_opt.proof.activity import Activity, activities
from ascend_opt.proof.engine_run import Batch, EngineProcess, EngineRunError
from ascend_opt.proof.intervals import CONFIDENCE, Paired, least_rounds, paired
from ascend_opt.proof.runner import Requests, Runner, as_plain, effects
from ascend_opt.proof.tracing import merge
from ascend_opt.proof.worker import EXTENSION

WARM_UP = 2
SETTLE_S = 0.4
LEAD_IN_TOKENS = 4
BLOCKS = 2
"""Of rounds, each with engines of its own, where they run in turn."""

_LEAD_IN_SEED = -(10**9)  # far from those of the rounds
_NO_ROOM = (
    "An unpatched engine was running beside it: give each less than half of the device's memory "
    "(-- --gpu-memory-utilization 0.45), or say --in-turn."
)

OFF, ON = "off", "on"


@dataclass(frozen=True)
class Metric:
    """A measured quantity."""

    name: str
    unit: str
    higher_is_better: bool = False


TPOT = Metric("TPOT", "ms")
TTFT = Metric("TTFT", "ms")
THROUGHPUT = Metric("throughput", "tokens/s", higher_is_better=True)
METRICS = {metric.name: metric for metric in (TPOT, TTFT, THROUGHPUT)}

STEP = Metric("step", "ms")
CPU = Metric("CPU of the step", "ms")
HOST_METRICS = {metric.name: metric for metric in (STEP, CPU)}
"""Of `bench --host`."""


def metric(name: str, method_unit: str = "ms a call") -> Metric:
    """Return a metric; what is none of those above is milliseconds in a host method."""
    return METRICS.get(name) or HOST_METRICS.get(name) or Metric(name, method_unit)


@dataclass(frozen=True)
class Load:
    """Requests that are handed over together.

    Attributes:
        num_requests: How many.
        input_len: Tokens in each prompt.
        output_len: Tokens generated for each.
    """

    num_requests: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.input_len}+{self.output_len}"


@dataclass(frozen=True)
class Candidate:
    """A configuration that is tried against off."""

    label: str
    requests: Requests


@dataclass(frozen=True)
class Cell:
    """One candidate under one load; `method_unit` is that of times in host methods.

    Attributes:
        candidate: Its label.
        load: What the engine was under; its text says it.
        off: Metric to its value in each round, without the passes.
        on: The same with them, pair by pair.
    """

    method_unit: ClassVar[str] = "ms a call"

    candidate: str
    load: Any
    off: dict[str, list[float]] = field(default_factory=dict)
    on: dict[str, list[float]] = field(default_factory=dict)

    def add(self, arm: str, values: Mapping[str, float]) -> None:
        """Add one round."""
        for name, value in values.items():
            (self.off if arm == OFF else self.on).setdefault(name, []).append(value)

    def compared(self, confidence: float = CONFIDENCE) -> dict[str, Paired]:
        """Return each metric's comparison; a method that one arm never called has none."""
        found = {}
        for name, off in self.off.items():
            on = self.on.get(name, [])
            if len(on) == len(off) and min(*off, *on) > 0:
                found[name] = paired(off, on, confidence)
        return found


@dataclass(frozen=True)
class Benchmark:
    """The result of `bench`.

    Attributes:
        cells: Every candidate under every load.
        passes: Label of a candidate to its passes, as in a configuration.
        activity: Label of a candidate to what became of its passes.
        facts: Versions, device and engine.
        setup: How it was measured.
        notes: What could not be measured, and why.
        traces: What was traced to the file with its trace.
    """

    cells: tuple[Cell, ...]
    passes: dict[str, dict[str, Any]]
    activity: dict[str, list[Activity]]
    facts: dict[str, Any]
    setup: dict[str, Any]
    notes: tuple[str, ...] = ()
    traces: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, raw rounds included, as `--json` prints them."""
        return {
            "setup": self.setup,
            "facts": self.facts,
            "passes": self.passes,
            "activity": {
                label: [item.as_dict() for item in found] for label, found in self.activity.items()
            },
            "notes": list(self.notes),
            "traces": self.traces,
            "cells": [
                {
                    **dataclasses.asdict(cell),
                    "compared": {n: p.as_dict() for n, p in cell.compared().items()},
                }
                for cell in self.cells
            ],
        }


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        loads: What each candidate is measured under.
        rounds: Pairs for each candidate and load, warm-up not counted.
        in_turn: One engine at a time.
        trace: Directory for a trace of each arm, under the first load; None for no traces.
    """

    loads: tuple[Load, ...]
    rounds: int
    in_turn: bool = False
    trace: Path | None = None

    def __post_init__(self) -> None:
        if self.rounds < least_rounds():
            raise ValueError(f"rounds={self.rounds}, expected at least {least_rounds()}")


class _Bench:
    def __init__(self, runner: Runner, candidates: Sequence[Candidate], plan: Plan) -> None:
        self.runner = runner
        self.candidates = candidates
        self.plan = plan
        self.notes: list[str] = []
        self.traces: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.activity: dict[str, list[Activity]] = {}
        self.targets = host_targets(candidates)
        own = [w for w in runner.subject.arguments if w.startswith("--worker-extension-cls")]
        if self.targets and own:
            self.targets = []
            self.notes.append("no time in host methods: --worker-extension-cls is taken")
        self._extended = not own and (bool(self.targets) or plan.trace is not None)
        self._log = runner.workspace.path / "rounds.jsonl"
        self._done = 0
        self._started = 0

    def start(self, stack: ExitStack, arm: str, candidate: Candidate) -> EngineProcess:
        """Start an engine that ends with `stack`, and wait for it."""
        requests = candidate.requests if arm == ON else {}
        self._started += 1
        text = f"starting the engine with {candidate.label}" if requests else "starting unpatched"
        with self.runner.progress.stage(text):
            engine = stack.enter_context(
                self.runner.engine(
                    f"{arm}-{self._started}",
                    requests,
                    ("--worker-extension-cls", EXTENSION) if self._extended else (),
                )
            )
            try:
                facts = engine.started()
            except EngineRunError as error:
                if self._started == 1 or self.plan.in_turn:
                    raise
                raise EngineRunError(f"{error}\n{_NO_ROOM}") from None
        self.facts = {key: value for key, value in facts.items() if key != "start_s"}
        if self.targets:
            found = engine.ask("time", targets=self.targets)
            if found["problem"] and found["problem"] not in self.notes:
                self.notes.append(found["problem"])
        return engine

    def round(self, engine: EngineProcess, load: Load, number: int) -> dict[str, float]:
        """Run one batch; `number` chooses its prompts."""
        prompts = _prompts(load, number)
        time.sleep(SETTLE_S)
        lead_in = {"random": load.input_len, "seed": _LEAD_IN_SEED - number}
        engine.generate([lead_in], min(LEAD_IN_TOKENS, load.output_len))
        if self.targets:
            engine.ask("times")  # from here on
        batch = engine.generate(prompts, load.output_len)
        values = measured(batch)
        if self.targets:
            for target, (calls, seconds) in engine.ask("times")["times"].items():
                if calls:
                    values[target] = 1e3 * seconds / calls
        return values

    def trace(self, engine: EngineProcess, arm: str, candidate: Candidate) -> None:
        """Leave a trace of an arm, if one is wanted."""
        if self.plan.trace is None:
            return
        what = candidate.label if arm == ON else "unpatched"
        name = arm
        if arm == ON and len(self.candidates) > 1:
            name = f"{ON}-{1 + self.candidates.index(candidate)}"
        load = self.plan.loads[0]
        directory = self.runner.workspace.scratch(f"trace-{name}")
        directory.mkdir()
        with self.runner.progress.stage(f"tracing {what}, {load}"):
            found = engine.ask(
                "trace",
                targets=_owners(self.candidates),
                effects=effects(candidate.requests),
                directory=str(directory),
                prompts=_prompts(load, self.plan.rounds),  # of no round
                max_tokens=load.output_len,
                logprobs=None,
            )
        if found["problem"]:
            self.notes.append(f"no trace of {what}: {found['problem']}")
            return
        path = self.plan.trace.absolute() / f"{name}.json"
        merge(found["parts"], path)
        self.traces[what] = str(path)

    def warm_up(self, engine: EngineProcess, load: Load) -> None:
        for number in range(WARM_UP):
            self.round(engine, load, -1 - number)

    def check(self, engine: EngineProcess, candidate: Candidate) -> None:
        """Make sure that what is measured is on.

        Raises:
            NotApplicableError: A pass was not.
        """
        if candidate.label in self.activity:
            return
        found = activities(candidate.requests, engine.records(), effects(candidate.requests))
        self.activity[candidate.label] = found
        idle = [f"{item.name}: {item.problem}" for item in found if item.problem]
        if idle:
            raise NotApplicableError(f"nothing to measure with {candidate.label}: {idle[0]}")

    def keep(self, cell: Cell, arm: str, values: dict[str, float]) -> None:
        cell.add(arm, values)
        line = {"candidate": cell.candidate, "load": dataclasses.asdict(cell.load), "arm": arm}
        with self._log.open("a") as file:
            file.write(json.dumps({**line, **values}) + "\n")
        self._done += 1
        total = 2 * self.plan.rounds * len(self.plan.loads) * len(self.candidates)
        self.runner.progress.update(self._done, total)

    def side_by_side(self) -> Iterator[Cell]:
        with ExitStack() as both:
            off = self.start(both, OFF, self.candidates[0])
            warm: set[Load] = set()
            for candidate in self.candidates:
                with ExitStack() as one:
                    on = self.start(one, ON, candidate)
                    for load in self.plan.loads:
                        cell = Cell(candidate.label, load)
                        with self.runner.progress.stage(f"{candidate.label}, {load}"):
                            if load not in warm:
                                self.warm_up(off, load)
                                warm.add(load)
                            self.warm_up(on, load)
                            self.check(on, candidate)
                            for number in range(self.plan.rounds):
                                for arm, engine in ((OFF, off), (ON, on)):
                                    self.keep(cell, arm, self.round(engine, load, number))
                                    self.runner.progress.waiting()
                        yield cell
                    self.trace(on, ON, candidate)
            self.trace(off, OFF, self.candidates[-1])

    def in_turn(self) -> Iterator[Cell]:
        for candidate in self.candidates:
            cells = {load: Cell(candidate.label, load) for load in self.plan.loads}
            for block in range(BLOCKS):
                numbers = range(self.plan.rounds)[block::BLOCKS]
                # The second block the other way round, so that a drift favours neither arm.
                for arm in (ON, OFF) if block % 2 else (OFF, ON):
                    with ExitStack() as one:
                        engine = self.start(one, arm, candidate)
                        for load, cell in cells.items():
                            with self.runner.progress.stage(f"{candidate.label} {arm}, {load}"):
                                self.warm_up(engine, load)
                                if arm == ON:
                                    self.check(engine, candidate)
                                for number in numbers:
                                    self.keep(cell, arm, self.round(engine, load, number))
                        last = candidate is self.candidates[-1]
                        if block == BLOCKS - 1 and (arm == ON or last):
                            self.trace(engine, arm, candidate)
            yield from cells.values()


def bench(
    runner: Runner,
    candidates: Sequence[Candidate],
    plan: Plan,
    each: Callable[[Cell], None] = lambda cell: None,
) -> Benchmark:
    """Measure candidates against off.

    Args:
        runner: Runs the engines.
        candidates: Configurations, at least one.
        plan: How to measure.
        each: Called with every cell as it is complete.

    Raises:
        EngineInputError: vLLM does not take the arguments, or a prompt does not fit.
        EngineRunError: An engine died.
        NotApplicableError: A pass was not on.
    """
    work = _Bench(runner, candidates, plan)
    cells = []
    for cell in work.in_turn() if plan.in_turn else work.side_by_side():
        cells.append(cell)
        each(cell)
    return Benchmark(
        cells=tuple(cells),
        passes={c.label: as_plain(c.requests) for c in candidates},
        activity=work.activity,
        facts=work.facts,
        setup={
            "rounds": plan.rounds,
            "warm_up_rounds": WARM_UP,
            "engines": "in turn" if plan.in_turn else "side by side",
            "confidence": CONFIDENCE,
            "arguments": list(runner.subject.arguments),
        },
        notes=tuple(work.notes),
        traces=work.traces,
    )


def measured(batch: Batch) -> dict[str, float]:
    """Return the metrics of one batch: medians over its requests, and tokens over its time.

    TPOT is left out where requests have one token only.
    """
    answers = batch.answers
    found = {
        TTFT.name: 1e3 * statistics.median(answer.first_s for answer in answers),
        THROUGHPUT.name: sum(len(answer.tokens) for answer in answers) / batch.wall_s,
    }
    gaps = [
        (answer.last_s - answer.first_s) / (len(answer.tokens) - 1)
        for answer in answers
        if len(answer.tokens) > 1
    ]
    return {TPOT.name: 1e3 * statistics.median(gaps), **found} if gaps else found


def host_targets(candidates: Sequence[Candidate]) -> list[str]:
    """Return the targets of host patches; traced ones are part of a compiled model."""
    return list(_owners(candidates))


def _owners(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return each target of a host patch with its pass."""
    found: dict[str, str] = {}
    for candidate in candidates:
        for name in candidate.requests:
            for patch in registry.discover().get(name).cls.patches:
                if patch.kind is Kind.HOST:
                    found.setdefault(str(patch.target), name)
    return found


def _prompts(load: Load, number: int) -> list[dict[str, int]]:
    """Return the prompts of a round; no two rounds share one."""
    return [
        {"random": load.input_len, "seed": number * load.num_requests + index}
        for index in range(load.num_requests)
    ]
