"""The commands `verify`, `bisect`, `bench` and `tune`: does a pass keep every token, does it pay.

Exit codes: 0 fine, 1 a check failed, 2 usage or an engine that does not run, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ascend_opt import config as configuration
from ascend_opt import preview, registry
from ascend_opt.doctor import filtered_out
from ascend_opt.errors import AscendOptError, NotApplicableError
from ascend_opt.proof.model import resolve_model
from ascend_opt.proof.prompts import default_prompts, read_prompts
from ascend_opt.proof.runner import Requests, Runner, Subject
from ascend_opt.proof.workspace import Progress, Workspace

if TYPE_CHECKING:
    from ascend_opt.proof.bench import Benchmark, Cell, Plan

INTERRUPTED = 130


def _options(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


subject_options = _options(
    click.option(
        "--enable",
        "enables",
        multiple=True,
        metavar="PASS[:key=value,...]",
        help="A pass; may be given again.",
    ),
    click.option("--config", "config", type=click.Path(), help="Passes of a YAML configuration."),
    click.option(
        "--model",
        required=True,
        help="A checkpoint's directory, a cached Hugging Face name, or 'tiny': a small random "
        "Qwen3 that is made on the spot.",
    ),
    click.option(
        "--python",
        "python",
        default=shlex.join([sys.executable]),
        metavar="COMMAND",
        help="What starts Python for the engines, such as 'python -m ascend_opt simnpu run -- "
        "python'.",
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
    click.option(
        "--output",
        type=click.Path(),
        metavar="DIR",
        help="Keep logs and results there; otherwise they are kept only where something failed.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON for a script."),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM ARGUMENTS]"),
)

prompt_options = _options(
    click.option(
        "--prompts",
        "prompts",
        type=click.Path(),
        metavar="FILE",
        help="One prompt a line, or .jsonl; left out: a fixed set of 14 lengths.",
    ),
    click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True),
    click.option(
        "--logprob-tolerance",
        "tolerance",
        type=click.FloatRange(min=0),
        default=1e-3,
        show_default=True,
        metavar="NATS",
        help="Difference of a token's logprob that counts as none.",
    ),
)


bench_options = _options(
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


def reporting_errors(command: Callable[..., None]) -> Callable[..., None]:
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


def requested(enables: tuple[str, ...], config: str | None, launcher: bool) -> Requests:
    """Return the passes that the user named.

    Args:
        enables: Values of `--enable`.
        config: Value of `--config`.
        launcher: The engines' Python is another one, so what is installed here says nothing.

    Raises:
        UsageError: None was named, or none could be on.
        AscendOptError: One is wrong, or cannot be on here.
    """
    if not enables and config is None:
        raise click.UsageError("nothing to try: give --enable PASS or --config FILE")
    allowed = filtered_out()
    if allowed is not None:
        raise click.UsageError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading ascend_opt, so no pass would be "
            "on; add 'ascend_opt' to it"
        )
    found = {}
    if config is not None:
        read = configuration.from_file(config, registry.discover().classes())
        found = {request.name: request for request in read.requests}
    found |= {request.name: request for request in map(preview.parse_enable, enables)}
    if not found:
        raise click.UsageError(f"{config}: no passes in it")
    if not launcher:
        preview.require(list(found.values()))
    return found


@contextlib.contextmanager
def running(
    command: str,
    model: str,
    python: str,
    timeout_s: float,
    output: str | None,
    arguments: tuple[str, ...],
) -> Iterator[Runner]:
    """Give a runner; keep and name its results where the body does not end well."""
    words = shlex.split(python)
    if not words:
        raise click.UsageError("--python: expected a command")
    if any(word.split("=")[0] == "--model" for word in arguments):
        raise click.UsageError("give --model before --, not among vLLM's arguments")
    workspace = Workspace(output, command)
    well = False
    try:
        found = resolve_model(model, workspace.scratch)
        subject = Subject(found, arguments, tuple(words), timeout_s)
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


@click.command()
@subject_options
@prompt_options
@click.option("--junit", type=click.Path(), metavar="FILE", help="Write JUnit XML as well.")
@reporting_errors
def verify(
    enables: tuple[str, ...],
    config: str | None,
    model: str,
    python: str,
    timeout_s: float,
    output: str | None,
    as_json: bool,
    arguments: tuple[str, ...],
    prompts: str | None,
    max_tokens: int,
    tolerance: float,
    junit: str | None,
) -> None:
    """Check that passes are on and that every token is the same.

    Runs the engine with the passes and twice without, in processes of their own, on the same
    prompts. Fails if a token differs, if a pass was not on, or if the two runs without passes
    already differ.
    """
    from ascend_opt.proof import junit as xml
    from ascend_opt.proof import text
    from ascend_opt.proof.verify import verify as verification

    writable(junit)
    requests = requested(enables, config, launcher=shlex.split(python) != [sys.executable])
    texts = read_prompts(prompts) if prompts else default_prompts()
    with running("verify", model, python, timeout_s, output, arguments) as runner:
        found = verification(runner, requests, texts, max_tokens, tolerance)
        runner.workspace.write("result.json", found.as_dict())
        if junit:
            Path(junit).write_text(xml.junit(found))
        if as_json:
            click.echo(json.dumps(found.as_dict(), indent=2))
        else:
            text.verification(found)
        if not found.passed:
            raise SystemExit(1)


@click.command()
@subject_options
@prompt_options
@reporting_errors
def bisect(
    enables: tuple[str, ...],
    config: str | None,
    model: str,
    python: str,
    timeout_s: float,
    output: str | None,
    as_json: bool,
    arguments: tuple[str, ...],
    prompts: str | None,
    max_tokens: int,
    tolerance: float,
) -> None:
    """Find the passes, and their targets, with which tokens differ or the engine dies.

    Halves the set of passes until the smallest one that is still wrong is left, then the targets
    of those. Exit code 0 if nothing is wrong, 1 with the culprits if something is.
    """
    from ascend_opt.proof import text
    from ascend_opt.proof.bisect import bisect as bisection

    requests = requested(enables, config, launcher=shlex.split(python) != [sys.executable])
    texts = read_prompts(prompts) if prompts else default_prompts()
    with running("bisect", model, python, timeout_s, output, arguments) as runner:
        found = bisection(runner, requests, texts, max_tokens, tolerance)
        runner.workspace.write("result.json", found.as_dict())
        if as_json:
            click.echo(json.dumps(found.as_dict(), indent=2))
        else:
            text.bisection(found)
        if found.wrong:
            raise SystemExit(1)


def measure(
    command: str,
    enables: tuple[str, ...],
    config: str | None,
    model: str,
    python: str,
    timeout_s: float,
    output: str | None,
    arguments: tuple[str, ...],
    sweeps: tuple[str, ...],
    plan: Plan,
) -> tuple[Benchmark, Path]:
    """Run a benchmark and write all that comes of it; return it and the directory."""
    from ascend_opt.proof import plot, report
    from ascend_opt.proof.bench import bench as benchmark
    from ascend_opt.proof.sweep import candidates

    launcher = shlex.split(python) != [sys.executable]
    named = {} if sweeps and not enables and config is None else requested(enables, config, True)
    tried = candidates(named, sweeps)
    for candidate in tried if not launcher else ():
        preview.require(list(candidate.requests.values()))
    directory = output or time.strftime(f"ascend_opt-{command}-%Y%m%d-%H%M%S")
    with running(command, model, python, timeout_s, directory, arguments) as runner:

        def say(cell: Cell) -> None:
            for row in report.rows([cell]):
                runner.progress.say(f"{row.candidate}, {row.load}: {row.sentence}")

        found = benchmark(runner, tried, plan, say)
        runner.workspace.write("result.json", found.as_dict())
        svg = plot.save(found, runner.workspace.path)
        runner.workspace.write("report.html", report.html(found, svg))
        return found, runner.workspace.path


def plan_of(num_requests: str, input_len: str, output_len: int, rounds: int, turn: bool) -> Plan:
    """Return how to measure, once the packages that it takes are there.

    Raises:
        UsageError: They are not.
        SweepError: A list of numbers is none.
    """
    missing = [name for name in ("scipy", "matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"{', '.join(missing)} not installed; pip install 'ascend-opt[proof]'"
        )
    from ascend_opt.proof.bench import Plan
    from ascend_opt.proof.sweep import loads

    return Plan(loads(num_requests, input_len, output_len), rounds, turn)


@click.command()
@subject_options
@bench_options
@reporting_errors
def bench(
    enables: tuple[str, ...],
    config: str | None,
    model: str,
    python: str,
    timeout_s: float,
    output: str | None,
    as_json: bool,
    arguments: tuple[str, ...],
    sweeps: tuple[str, ...],
    num_requests: str,
    input_len: str,
    output_len: int,
    rounds: int,
    in_turn: bool,
) -> None:
    """Measure what passes buy: off and on by turns, with intervals.

    Two engines live side by side and take turns on the same requests. Writes a table, plots
    (PNG, SVG), an HTML report and every raw number to a directory.
    """
    from ascend_opt.proof import text

    plan = plan_of(num_requests, input_len, output_len, rounds, in_turn)
    found, directory = measure(
        *("bench", enables, config, model, python, timeout_s, output, arguments, sweeps, plan)
    )
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        text.benchmark(found)
        click.echo(f"Report: {directory / 'report.html'}")


@click.command()
@subject_options
@bench_options
@click.option(
    "--metric",
    "wanted",
    type=click.Choice(["TPOT", "TTFT", "throughput"], case_sensitive=False),
    default="TPOT",
    show_default=True,
    help="What is to be better; none of the three may be worse.",
)
@click.option("--write", "path", type=click.Path(), metavar="FILE", help="Where the YAML goes.")
@reporting_errors
def tune(
    enables: tuple[str, ...],
    config: str | None,
    model: str,
    python: str,
    timeout_s: float,
    output: str | None,
    as_json: bool,
    arguments: tuple[str, ...],
    sweeps: tuple[str, ...],
    num_requests: str,
    input_len: str,
    output_len: int,
    rounds: int,
    in_turn: bool,
    wanted: str,
    path: str | None,
) -> None:
    """Sweep, and write the configuration that measurably wins here, if one does.

    Exit code 0 either way: that nothing wins is an answer too.
    """
    from ascend_opt.proof import text
    from ascend_opt.proof import tune as tuning
    from ascend_opt.proof.bench import metric
    from ascend_opt.proof.intervals import least_rounds
    from ascend_opt.proof.sweep import candidates

    writable(path)
    plan = plan_of(num_requests, input_len, output_len, rounds, in_turn)
    tried = candidates(requested(enables, config, True) if enables or config else {}, sweeps)
    least = least_rounds(tuning.confidence_of(len(tried) * len(plan.loads)))
    if rounds < least:
        raise click.UsageError(
            f"{len(tried)} candidates under {len(plan.loads)} loads need --rounds {least} or "
            f"more, found {rounds}"
        )
    found, directory = measure(
        *("tune", enables, config, model, python, timeout_s, output, arguments, sweeps, plan)
    )
    choice = tuning.choose(found, metric(wanted))
    yaml = tuning.as_yaml(found, choice, metric(wanted)) if choice.winner else None
    if yaml:
        (directory / "tuned.yaml").write_text(yaml)
        if path:
            Path(path).write_text(yaml)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(choice), "yaml": yaml}, indent=2))
        return
    text.benchmark(found)
    for line in choice.lines:
        click.echo(line)
    click.echo(yaml or "Nothing wins here: leave the passes off, or measure with more --rounds.")
    click.echo(f"Report: {directory / 'report.html'}")
