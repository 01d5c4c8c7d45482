"""bench --host: passes swapped step by step in one engine over a device that takes no time.

An engine runs the real vllm-ascend on the simulated driver without compute, with the shapes of a
model and none of its weights. In steady decode every round takes a turn with each arm, unpatched
and each candidate, so that the arms of a pair are a few steps apart and slow noise cancels.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ascend_opt import registry
from ascend_opt.base import Kind
from ascend_opt.config import ENVIRONMENT
from ascend_opt.errors import AscendOptError, NotApplicableError
from ascend_opt.proof.activity import Activity, activities
from ascend_opt.proof.bench import OFF, ON, STEP, Benchmark, Candidate, Cell, host_targets
from ascend_opt.proof.engine_run import EngineProcess, Job
from ascend_opt.proof.host.engine import steps_of
from ascend_opt.proof.host.profiling import Profile, compare
from ascend_opt.proof.host.shapes import write_shapes
from ascend_opt.proof.intervals import CONFIDENCE
from ascend_opt.proof.runner import as_plain, effects
from ascend_opt.proof.workspace import Progress, Workspace

EAGER, GRAPH = "eager", "graph"
MODES = (EAGER, GRAPH)
INPUT_LEN = 32
BLOCK = 128
"""Tokens in a block of the cache, on Ascend."""
PROFILED_STEPS = 60
NOT_MEASURED = (
    "Not measured: the device's time, and what a launch costs on a real driver. What the host "
    "saves shortens a step on a card only where the host is what the step waits for."
)

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler's time is the host's too
    "SIMNPU_MEM_GB": "4096",  # of address space
    ENVIRONMENT: "",
}
_DEFAULTS = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


class HostBenchError(AscendOptError, RuntimeError):
    """There is no simulated driver here, or a pass that cannot be swapped between steps."""


@dataclass(frozen=True)
class HostLoad:
    """What an engine is under.

    Attributes:
        num_requests: Requests that decode together.
        max_num_seqs: How many there is room for.
        mode: `eager`, or `graph` (full graphs for decode).
    """

    num_requests: int
    max_num_seqs: int
    mode: str

    def __str__(self) -> str:
        return f"{self.num_requests} of {self.max_num_seqs} requests, {self.mode}"


@dataclass(frozen=True)
class HostPlan:
    """How to measure.

    Attributes:
        shapes: See `shapes.write_shapes`.
        num_requests: Batch sizes.
        max_num_seqs: Each with an engine of its own.
        mode: See `HostLoad`.
        rounds: Pairs for each candidate and load.
        profile: Profile what is left with the last candidate, at the smallest and largest batch.
        arguments: Of vLLM, after ours.
        timeout_s: When to give up on a start or a command.
    """

    shapes: str
    num_requests: tuple[int, ...]
    max_num_seqs: tuple[int, ...]
    mode: str
    rounds: int
    profile: bool = False
    arguments: tuple[str, ...] = ()
    timeout_s: float = 1800

    def loads(self, room: int) -> list[HostLoad]:
        """Return the loads of the engine that has room for so many requests."""
        return [HostLoad(n, room, self.mode) for n in self.num_requests if n <= room]

    def engine_arguments(self, room: int, tokens: int) -> list[str]:
        """Return vLLM's arguments.

        Args:
            room: `max_num_seqs`.
            tokens: What each request makes.
        """
        blocks = -(-(INPUT_LEN + tokens) // BLOCK)
        words = ["--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
        words += ["--max-num-seqs", str(room), "--max-model-len", str(blocks * BLOCK)]
        words += ["--max-num-batched-tokens", str(max(8192, blocks * BLOCK))]
        words += ["--num-gpu-blocks-override", str(room * blocks + 1)]
        if self.mode == EAGER:
            return [*words, "--enforce-eager", *self.arguments]
        graphs = {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(load.num_requests for load in self.loads(room)),
        }
        return [*words, "--compilation-config", json.dumps(graphs), *self.arguments]


@dataclass(frozen=True)
class HostCell(Cell):
    """One candidate under one load: milliseconds of a step, in it and in each patched method.

    Attributes:
        off_calls: Kind of driver call to its number in each timed step, without the passes.
        on_calls: The same with them.
    """

    method_unit: ClassVar[str] = "ms a step"

    off_calls: dict[str, list[int]] = field(default_factory=dict)
    on_calls: dict[str, list[int]] = field(default_factory=dict)

    def add_calls(self, arm: str, calls: Mapping[str, int]) -> None:
        """Add the driver calls of one step."""
        for kind, count in calls.items():
            (self.off_calls if arm == OFF else self.on_calls).setdefault(kind, []).append(count)

    def changed_calls(self) -> dict[str, tuple[float, float]]:
        """Return the kinds of call whose median differs, with both medians."""
        found = {}
        for kind, off in self.off_calls.items():
            pair = statistics.median(off), statistics.median(self.on_calls[kind])
            if pair[0] != pair[1]:
                found[kind] = pair
        return found

    def saved_ms(self, metric: str) -> float:
        """Return the median over the pairs of what is saved."""
        pairs = zip(self.off[metric], self.on[metric], strict=True)
        return statistics.median(off - on for off, on in pairs)

    def shares(self, metric: str) -> tuple[float, float]:
        """Return the part of the step that a method takes, without and with the passes."""
        off, on = (statistics.median(arm[metric]) for arm in (self.off, self.on))
        steps = [statistics.median(arm[STEP.name]) for arm in (self.off, self.on)]
        return off / steps[0], on / steps[1]


@dataclass(frozen=True)
class HostBenchmark:
    """The result of `bench --host`.

    Attributes:
        benchmark: Everything that other benchmarks have; its cells are `HostCell`s.
        profiles: What is left, for each engine, where it was asked for.
        peak_gib: The most memory of the host that an engine's process took.
    """

    benchmark: Benchmark
    profiles: tuple[Profile, ...]
    peak_gib: float

    @property
    def cells(self) -> Iterator[HostCell]:
        """The cells."""
        for cell in self.benchmark.cells:
            assert isinstance(cell, HostCell)
            yield cell

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as `--json` prints them."""
        return {
            **self.benchmark.as_dict(),
            "profiles": [profile.as_dict() for profile in self.profiles],
            "peak_gib": self.peak_gib,
        }


class _Measuring:
    def __init__(
        self,
        plan: HostPlan,
        candidates: Sequence[Candidate],
        workspace: Workspace,
        progress: Progress,
    ) -> None:
        self.plan, self.candidates = plan, candidates
        self.workspace, self.progress = workspace, progress
        self.environment = _simulated()
        self.model = write_shapes(plan.shapes, workspace.scratch("shapes"))
        self.targets = host_targets(candidates)
        self.arms: list[tuple[str, dict[str, Any]]] = [
            (OFF, {}),
            *((c.label, as_plain(c.requests)) for c in candidates),
        ]
        self.activity: dict[str, list[Activity]] = {}
        self.facts: dict[str, Any] = {}
        self.profiles: list[Profile] = []
        self.peak_gib = 0.0

    def cells(self) -> Iterator[HostCell]:
        for room in self.plan.max_num_seqs:
            loads = self.plan.loads(room)
            if not loads:
                continue
            with self._engine(room) as engine:
                for load in loads:
                    yield from self._measured(engine, load)
                if self.plan.profile:
                    self.profiles.append(self._profiled(engine, loads))
                self.peak_gib = max(self.peak_gib, engine.ask("peak")["gib"])

    @contextlib.contextmanager
    def _engine(self, room: int) -> Iterator[EngineProcess]:
        tokens = max(steps_of(self.plan.rounds, len(self.arms)), PROFILED_STEPS + 32)
        arguments = tuple(self.plan.engine_arguments(room, tokens))
        job = Job(str(self.model), environment=self.environment, arguments=arguments)
        with EngineProcess(
            job,
            module="ascend_opt.proof.host.engine",
            timeout_s=self.plan.timeout_s,
            directory=self.workspace.path,
            name=f"host-{room}",
            waiting=self.progress.waiting,
        ) as engine:
            with self.progress.stage(f"starting an engine for {room} requests, {self.plan.mode}"):
                facts = engine.started()
            self.facts = {key: value for key, value in facts.items() if key != "start_s"}
            yield engine

    def _measured(self, engine: EngineProcess, load: HostLoad) -> list[HostCell]:
        cells = {c.label: HostCell(c.label, load) for c in self.candidates}

        def keep(found: dict[str, Any]) -> None:
            turns = found["turns"]
            for label, cell in cells.items():
                for arm, turn in ((OFF, turns[OFF]), (ON, turns[label])):
                    cell.add(arm, turn["times"])
                    cell.add_calls(arm, turn["calls"])
            self.progress.update(found["round"] + 1, self.plan.rounds)

        with self.progress.stage(str(load)):
            answer = engine.ask(
                "measure",
                keep,
                num_requests=load.num_requests,
                input_len=INPUT_LEN,
                rounds=self.plan.rounds,
                arms=self.arms,
                targets=self.targets,
            )
        for candidate in self.candidates:
            self._check(candidate, answer["records"][candidate.label])
        return list(cells.values())

    def _check(self, candidate: Candidate, record: Mapping[str, Any]) -> None:
        found = activities(candidate.requests, [record], effects(candidate.requests))
        self.activity.setdefault(candidate.label, found)
        idle = [f"{item.name}: {item.problem}" for item in found if item.problem]
        if idle:
            raise NotApplicableError(f"nothing to measure with {candidate.label}: {idle[0]}")

    def _profiled(self, engine: EngineProcess, loads: Sequence[HostLoad]) -> Profile:
        label, passes = self.arms[-1]
        found = []
        for load in (loads[0], loads[-1]):
            with self.progress.stage(f"profile of {load}"):
                answer = engine.ask(
                    "profile",
                    num_requests=load.num_requests,
                    input_len=INPUT_LEN,
                    steps=PROFILED_STEPS,
                    passes=passes,
                )
            found.append((load.num_requests, answer["rows"]))
        under = f"max_num_seqs {loads[0].max_num_seqs}, {self.plan.mode}"
        return compare(label, under, found[0], found[1])


def host_bench(
    plan: HostPlan, candidates: Sequence[Candidate], workspace: Workspace, progress: Progress
) -> HostBenchmark:
    """Measure the host's time of decode steps.

    Args:
        plan: How to measure.
        candidates: Configurations of host passes, at least one.
        workspace: Where logs and rounds are kept.
        progress: What the user sees meanwhile.

    Raises:
        HostBenchError: There is no simulated driver here, or a pass cannot be swapped.
        ShapesError: There are no such shapes.
        EngineInputError: vLLM does not take the arguments, or the requests do not fit.
        EngineRunError: The engine died.
        NotApplicableError: A pass was not on.
    """
    for candidate in candidates:
        _swappable(candidate)
    work = _Measuring(plan, candidates, workspace, progress)
    cells = tuple(work.cells())
    benchmark = Benchmark(
        cells=cells,
        passes=dict(work.arms[1:]),
        activity=work.activity,
        facts=work.facts,
        setup={
            "shapes": plan.shapes,
            "mode": plan.mode,
            "rounds": plan.rounds,
            "warm_up_rounds": 0,
            "engines": "one, passes swapped between steps",
            "loads": "requests that decode together",
            "confidence": CONFIDENCE,
            "arguments": list(plan.arguments),
        },
        notes=(NOT_MEASURED, *_left_out(plan)),
    )
    return HostBenchmark(benchmark, tuple(work.profiles), work.peak_gib)


def together(candidate: Candidate) -> list[Candidate]:
    """Return each pass of a candidate by itself, and then all of them."""
    alone = [Candidate(name, {name: request}) for name, request in candidate.requests.items()]
    return [*alone, candidate] if len(alone) > 1 else [candidate]


def _swappable(candidate: Candidate) -> None:
    for name in candidate.requests:
        cls = registry.discover().get(name).cls
        if cls.changes_graph or any(patch.kind is not Kind.HOST for patch in cls.patches):
            raise HostBenchError(
                f"{name} changes the model's graph, which a running engine keeps, so it cannot be "
                "swapped between steps; measure it with bench, without --host"
            )


def _left_out(plan: HostPlan) -> list[str]:
    return [
        f"max_num_seqs {room} has no room for {n} requests: not measured"
        for room in plan.max_num_seqs
        for n in plan.num_requests
        if n > room
    ]


def _simulated() -> dict[str, str]:
    """Return the environment of a process over the simulated driver that computes nothing.

    Raises:
        HostBenchError: It cannot be had here, and why.
    """
    from ascend_opt.simnpu import launch
    from ascend_opt.simnpu.build import BuildError
    from ascend_opt.simnpu.installation import prepare
    from ascend_opt.simnpu.releases import ReleaseError
    from ascend_opt.simnpu.schemas import SchemaError

    try:
        installation = prepare()
    except (ReleaseError, BuildError, SchemaError) as error:
        raise HostBenchError(
            f"bench --host runs the real vllm-ascend over the simulated driver: {error}"
        ) from None
    base = {**_DEFAULTS, **os.environ}
    return {**launch.environment(installation, base, compute="none"), **_ENVIRONMENT}
