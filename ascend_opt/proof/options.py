"""What the proof commands share on their command lines: options, errors, and where results go."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ascend_opt import config as configuration
from ascend_opt import preview, registry
from ascend_opt.doctor import filtered_out
from ascend_opt.errors import AscendOptError, NotApplicableError
from ascend_opt.proof.comparison import TOLERANCE
from ascend_opt.proof.engine_run import PromptSpec
from ascend_opt.proof.model import resolve_model
from ascend_opt.proof.prompts import LENGTHS, default_prompts, read_prompts
from ascend_opt.proof.runner import Requests, Runner, Subject
from ascend_opt.proof.workspace import Progress, Workspace

if TYPE_CHECKING:
    from ascend_opt.proof.bench import Plan
    from ascend_opt.proof.host.bench import HostPlan

INTERRUPTED = 130
Command = Callable[..., None]

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")


@dataclass(frozen=True)
class Asked:
    """Which passes on which engine.

    Attributes:
        enables: Values of `--enable`.
        config: Value of `--config`.
        model: Value of `--model`; None if it was left out.
        python: Command that starts Python for the engines.
        timeout_s: When to give up on an engine.
        output: Where results are kept.
        arguments: Of vLLM.
    """

    enables: tuple[str, ...]
    config: str | None
    model: str | None
    python: str
    timeout_s: float
    output: str | None
    arguments: tuple[str, ...]

    @property
    def elsewhere(self) -> bool:
        """Whether the engines' Python is another one: what is installed here says nothing."""
        return shlex.split(self.python) != [sys.executable]

    def requests(self) -> Requests:
        """Return the passes that were named.

        Raises:
            UsageError: None was named, or none could be on.
            AscendOptError: One is wrong, or cannot be on here.
        """
        if not self.enables and self.config is None:
            raise click.UsageError("nothing to try: give --enable PASS or --config FILE")
        found = {}
        if self.config is not None:
            read = configuration.from_file(self.config, registry.discover().classes())
            found = {request.name: request for request in read.requests}
        found |= {request.name: request for request in map(preview.parse_enable, self.enables)}
        if not found:
            raise click.UsageError(f"{self.config}: no passes in it")
        self.require(found)
        return found

    def require(self, requests: Requests) -> None:
        """Make sure that passes can be on, as far as that is known before an engine runs.

        Raises:
            UsageError: vLLM would not load them.
            NotApplicableError: One cannot be on here.
        """
        allowed = filtered_out()
        if allowed is not None:
            raise click.UsageError(
                f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading ascend_opt, so no pass would "
                "be on; add 'ascend_opt' to it"
            )
        if not self.elsewhere:
            preview.require(list(requests.values()))

    @contextlib.contextmanager
    def running(self, command: str, output: str | None = None) -> Iterator[Runner]:
        """Give a runner; keep and name its results where the body does not end well.

        Args:
            command: The command's name.
            output: Where results go if the user did not say.
        """
        words = shlex.split(self.python)
        if not words:
            raise click.UsageError("--python: expected a command")
        if any(word.split("=")[0] == "--model" for word in self.arguments):
            raise click.UsageError("give --model before --, not among vLLM's arguments")
        if self.model is None:
            raise click.UsageError("Missing option '--model'.")
        with self.working(command, output) as workspace:
            model = resolve_model(self.model, workspace.scratch)
            subject = Subject(model, self.arguments, tuple(words), self.timeout_s)
            yield Runner(subject, workspace, Progress(command))

    @contextlib.contextmanager
    def working(self, command: str, output: str | None = None) -> Iterator[Workspace]:
        """Give a place for results; keep and name them where the body does not end well.

        Args:
            command: The command's name.
            output: Where results go if the user did not say.
        """
        workspace = Workspace(self.output or output, command)
        well = False
        try:
            yield workspace
            well = True
        except SystemExit as ending:
            well = ending.code in (0, None)
            raise
        finally:
            kept = sorted(path.name for path in workspace.path.iterdir())
            if not well and kept:
                click.echo(f"Kept in {workspace.path}: {', '.join(kept)}", err=True)
            workspace.close(keep=not well and bool(kept))


def _collected(
    name: str, make: Callable[..., Any], keys: tuple[str, ...], *options: Any
) -> Callable[[Command], Command]:
    """Return a decorator that adds options and hands them to the command as one value."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def wrapped(**given: Any) -> None:
            made = make(**{key: given.pop(key) for key in keys})
            command(**{name: made}, **given)

        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorate


subject_options = _collected(
    "asked",
    Asked,
    tuple(field.name for field in dataclasses.fields(Asked)),
    click.option(
        "--enable",
        "enables",
        multiple=True,
        metavar="PASS[:key=value,...]",
        help="A pass; may be given again.",
    ),
    click.option("--config", type=click.Path(), help="Passes of a YAML configuration."),
    click.option(
        "--model",
        help="A checkpoint's directory, a cached Hugging Face name, or 'tiny': a small random "
        "Qwen3 that is made on the spot. Only `bench --host` does without.",
    ),
    click.option(
        "--python",
        default=shlex.join([sys.executable]),
        metavar="COMMAND",
        help="What starts Python for the engines, such as 'python -m ascend_opt simnpu run -- "
        "python'; left out: the one that runs this command.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=1),
        default=1800,
        show_default=True,
        metavar="SECONDS",
        help="Give up on an engine that takes longer to start, or to generate.",
    ),
    click.option("--output", type=click.Path(), metavar="DIR", help="Keep logs and results there."),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM ARGUMENTS]"),
)


@dataclass(frozen=True)
class Task:
    """What the engines generate, and how it is compared.

    Attributes:
        prompts: See `Job`.
        max_tokens: Tokens for each prompt.
        tolerance: Difference of logprobs (nats) that counts as none.
    """

    prompts: list[PromptSpec]
    max_tokens: int
    tolerance: float


def _task(prompts: str | None, max_tokens: int, tolerance: float) -> Callable[[], Task]:
    # Read inside the command, where errors are reported.
    return lambda: Task(
        [*(read_prompts(prompts) if prompts else default_prompts())], max_tokens, tolerance
    )


task_options = _collected(
    "task",
    _task,
    ("prompts", "max_tokens", "tolerance"),
    click.option(
        "--prompts",
        type=click.Path(),
        metavar="FILE",
        help=f"One prompt a line, or .jsonl; left out: a fixed set of {len(LENGTHS)} lengths.",
    ),
    click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True),
    click.option(
        "--logprob-tolerance",
        "tolerance",
        type=click.FloatRange(min=0),
        default=TOLERANCE,
        show_default=True,
        metavar="NATS",
        help="Difference of a token's logprob that counts as none.",
    ),
)


@dataclass(frozen=True)
class Measured:
    """What is measured, and how often; see the options of the same names."""

    num_requests: str | None
    input_len: str
    output_len: int
    rounds: int | None
    in_turn: bool
    trace: Path | None

    def __call__(self) -> Plan:
        """Return the plan of a benchmark.

        Raises:
            UsageError: A library is not installed.
            SweepError: An option cannot be read.
        """
        _require_libraries()
        from ascend_opt.proof.bench import Plan
        from ascend_opt.proof.sweep import loads

        found = loads(self.num_requests or "8", self.input_len, self.output_len)
        if self.trace is not None:
            try:
                self.trace.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise click.UsageError(f"--trace: {self.trace}: {error.strerror}") from None
        return Plan(found, self.rounds or 12, self.in_turn, self.trace)


def _require_libraries() -> None:
    missing = [name for name in ("scipy", "matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"{', '.join(missing)} not installed; pip install 'ascend-opt[proof]'"
        )


plan_options = _collected(
    "plan",
    Measured,
    tuple(field.name for field in dataclasses.fields(Measured)),
    click.option(
        "--sweep",
        "sweeps",
        multiple=True,
        metavar="PASS.PARAMETER=V,V,...",
        help="Try each value of a parameter; may be given again, for every combination.",
    ),
    click.option("--num-requests", metavar="N,N,...", help="8 if left out."),
    click.option("--input-len", default="128", show_default=True, metavar="N,N,..."),
    click.option("--output-len", type=click.IntRange(min=2), default=64, show_default=True),
    click.option(
        "--rounds",
        type=click.IntRange(min=6),
        help="Pairs of rounds, off and on, for each candidate and load; 12 if left out.",
    ),
    click.option(
        "--in-turn",
        is_flag=True,
        help="One engine at a time, where the device has no room for two: slower, and noisier.",
    ),
    click.option(
        "--trace",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Leave traces of some decode steps there for ui.perfetto.dev, off.json and on.json, "
        "with what the passes patch marked.",
    ),
)


@dataclass(frozen=True)
class Host:
    """What `bench --host` measures; see the options of the same names."""

    host: bool
    shapes: str
    max_num_seqs: str
    mode: str
    profile: bool

    def plan(self, asked: Asked, measured: Measured) -> HostPlan:
        """Return the plan of a benchmark of the host.

        Raises:
            UsageError: An option does not go with `--host`, or a library is not installed.
            SweepError: An option cannot be read.
        """
        _require_libraries()
        if asked.model is not None:
            raise click.UsageError("--host needs no weights: give --shapes, not --model")
        if measured.trace is not None:
            raise click.UsageError("--trace does not go with --host: leave one out")
        if asked.elsewhere:
            raise click.UsageError("--host starts its engines on simnpu: leave --python out")
        from ascend_opt.proof.host.bench import HostPlan
        from ascend_opt.proof.sweep import whole_numbers

        return HostPlan(
            shapes=self.shapes,
            num_requests=tuple(
                whole_numbers("--num-requests", measured.num_requests or _HOST_REQUESTS)
            ),
            max_num_seqs=tuple(whole_numbers("--max-num-seqs", self.max_num_seqs)),
            mode=self.mode,
            rounds=measured.rounds or _HOST_ROUNDS,
            profile=self.profile,
            arguments=asked.arguments,
            timeout_s=asked.timeout_s,
        )


_HOST_REQUESTS, _HOST_ROUNDS = "1,8,32,64,144,256", 40

host_options = _collected(
    "host",
    Host,
    tuple(field.name for field in dataclasses.fields(Host)),
    click.option(
        "--host",
        is_flag=True,
        help="The host's part of a decode step alone, without a device or weights: the real "
        "vllm-ascend over the simulated driver, passes swapped step by step. Then --num-requests "
        f"is {_HOST_REQUESTS} and --rounds {_HOST_ROUNDS} if left out.",
    ),
    click.option(
        "--shapes",
        default="qwen3-8b",
        show_default=True,
        metavar="MODEL",
        help="With --host: tiny, qwen3-8b, qwen3-32b, or the config.json of a dense Qwen2 or "
        "Qwen3.",
    ),
    click.option(
        "--max-num-seqs",
        default="256",
        show_default=True,
        metavar="N,N,...",
        help="With --host: room for requests, an engine for each.",
    ),
    click.option(
        "--mode",
        type=click.Choice(["eager", "graph"]),
        default="eager",
        show_default=True,
        help="With --host: eager, or full graphs for decode.",
    ),
    click.option(
        "--profile",
        is_flag=True,
        help="With --host: what is left with the passes, function by function; those first that "
        "grow with the number of requests.",
    ),
)


def reporting_errors(command: Command) -> Command:
    """Turn our errors into one message and an exit code, and an interrupt into another."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with _termination_as_interrupt():
                command(*args, **kwargs)
        except AscendOptError as error:
            click.echo(f"Error: {error}", err=True)
            raise SystemExit(1 if isinstance(error, NotApplicableError) else 2) from None
        except KeyboardInterrupt:
            click.echo("Interrupted: the engines were ended.", err=True)
            raise SystemExit(INTERRUPTED) from None

    return wrapped


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Have SIGTERM end the engines too, which are in sessions of their own."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def writable(path: str | None) -> None:
    """Make sure, before minutes of work, that a file can be written.

    Raises:
        UsageError: It cannot.
    """
    if path is None:
        return
    directory = Path(path).absolute().parent
    if Path(path).is_dir() or not os.access(directory, os.W_OK):
        raise click.UsageError(f"{path} cannot be written")
