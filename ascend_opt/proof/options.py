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

INTERRUPTED = 130
Command = Callable[..., None]

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")


@dataclass(frozen=True)
class Asked:
    """Which passes on which engine.

    Attributes:
        enables: Values of `--enable`.
        config: Value of `--config`.
        model: Value of `--model`.
        python: Command that starts Python for the engines.
        timeout_s: When to give up on an engine.
        output: Where results are kept.
        arguments: Of vLLM.
    """

    enables: tuple[str, ...]
    config: str | None
    model: str
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
        workspace = Workspace(self.output or output, command)
        well = False
        try:
            model = resolve_model(self.model, workspace.scratch)
            subject = Subject(model, self.arguments, tuple(words), self.timeout_s)
            yield Runner(subject, workspace, Progress(command))
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
        required=True,
        help="A checkpoint's directory, a cached Hugging Face name, or 'tiny': a small random "
        "Qwen3 that is made on the spot.",
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


def _plan(
    num_requests: str, input_len: str, output_len: int, rounds: int, in_turn: bool
) -> Callable[[], Plan]:
    def plan() -> Plan:
        missing = [name for name in ("scipy", "matplotlib", "jinja2") if find_spec(name) is None]
        if missing:
            raise click.UsageError(
                f"{', '.join(missing)} not installed; pip install 'ascend-opt[proof]'"
            )
        from ascend_opt.proof.bench import Plan
        from ascend_opt.proof.sweep import loads

        return Plan(loads(num_requests, input_len, output_len), rounds, in_turn)

    return plan


plan_options = _collected(
    "plan",
    _plan,
    ("num_requests", "input_len", "output_len", "rounds", "in_turn"),
    click.option(
        "--sweep",
        "sweeps",
        multiple=True,
        metavar="PASS.PARAMETER=V,V,...",
        help="Try each value of a parameter; may be given again, for every combination.",
    ),
    click.option("--num-requests", default="8", show_default=True, metavar="N,N,..."),
    click.option("--input-len", default="128", show_default=True, metavar="N,N,..."),
    click.option("--output-len", type=click.IntRange(min=2), default=64, show_default=True),
    click.option(
        "--rounds",
        type=click.IntRange(min=6),
        default=12,
        show_default=True,
        help="Pairs of rounds, off and on, for each candidate and load.",
    ),
    click.option(
        "--in-turn",
        is_flag=True,
        help="One engine at a time, where the device has no room for two: slower, and noisier.",
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
