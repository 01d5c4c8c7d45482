"""The commands `verify`, `bisect`, `bench` and `tune`: does a pass keep every token, does it pay.

Exit codes: 0 fine, 1 a check failed, 2 usage or an engine that does not run, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascend_opt.proof import options
from ascend_opt.proof.options import Asked, Host, Measured, Task

if TYPE_CHECKING:
    from ascend_opt.proof.bench import Benchmark, Candidate, Cell, Plan
    from ascend_opt.proof.host.bench import HostPlan


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


@click.command()
@options.subject_options
@options.task_options
@options.as_json
@click.option("--junit", type=click.Path(), metavar="FILE", help="Write JUnit XML as well.")
@options.reporting_errors
def verify(asked: Asked, task: Callable[[], Task], as_json: bool, junit: str | None) -> None:
    """Check that passes are on and that every token is the same.

    Runs the engine with the passes and twice without, in processes of their own, on the same
    prompts. Fails if a token differs, if a pass was not on, or if the two runs without passes
    already differ.
    """
    from ascend_opt.proof import junit as xml
    from ascend_opt.proof import text
    from ascend_opt.proof.verify import verify as verification

    options.writable(junit)
    requests, work = asked.requests(), task()
    with asked.running("verify") as runner:
        found = verification(runner, requests, work.prompts, work.max_tokens, work.tolerance)
        runner.workspace.write("result.json", found.as_dict())
        if junit:
            Path(junit).write_text(xml.junit(found))
        if as_json:
            _print_json(found.as_dict())
        else:
            text.verification(found)
        if not found.passed:
            raise SystemExit(1)


@click.command()
@options.subject_options
@options.task_options
@options.as_json
@options.reporting_errors
def bisect(asked: Asked, task: Callable[[], Task], as_json: bool) -> None:
    """Find the passes, and their targets, with which tokens differ or the engine dies.

    Halves the set of passes until the smallest one that is still wrong is left, then the targets
    of those. Exit code 0 if nothing is wrong, 1 with the culprits if something is.
    """
    from ascend_opt.proof import text
    from ascend_opt.proof.bisect import bisect as bisection

    requests, work = asked.requests(), task()
    with asked.running("bisect") as runner:
        found = bisection(runner, requests, work.prompts, work.max_tokens, work.tolerance)
        runner.workspace.write("result.json", found.as_dict())
        if as_json:
            _print_json(found.as_dict())
        else:
            text.bisection(found)
        if found.wrong:
            raise SystemExit(1)


def _candidates(asked: Asked, sweeps: Sequence[str]) -> list[Candidate]:
    from ascend_opt.proof.sweep import candidates

    # What is swept need not be enabled as well.
    named = asked.requests() if asked.enables or asked.config or not sweeps else {}
    found = candidates(named, sweeps)
    for candidate in found:
        asked.require(candidate.requests)
    return found


def _measure(
    command: str, asked: Asked, tried: Sequence[Candidate], plan: Plan
) -> tuple[Benchmark, Path]:
    """Run a benchmark and write all that comes of it; return it and the directory."""
    from ascend_opt.proof import plot, report
    from ascend_opt.proof.bench import bench as benchmark

    taken = [word for word in asked.arguments if word.startswith("--worker-extension-cls")]
    if plan.trace is not None and taken:
        raise click.UsageError(f"--trace needs {taken[0]} for itself: leave one out")
    with asked.running(command, time.strftime(f"ascend_opt-{command}-%Y%m%d-%H%M%S")) as runner:

        def say(cell: Cell) -> None:
            for row in report.rows([cell]):
                runner.progress.say(f"{row.candidate}, {row.load}: {row.sentence}")

        found = benchmark(runner, tried, plan, say)
        for what, path in found.traces.items():
            runner.progress.say(f"trace, {what}: {path}")
        runner.workspace.write("result.json", found.as_dict())
        svg = plot.save(found, runner.workspace.path)
        runner.workspace.write("report.html", report.html(found, svg))
        return found, runner.workspace.path


@click.command()
@options.subject_options
@options.plan_options
@options.host_options
@options.as_json
@options.reporting_errors
def bench(asked: Asked, plan: Measured, sweeps: tuple[str, ...], host: Host, as_json: bool) -> None:
    """Measure what passes buy: off and on by turns, with intervals.

    Two engines live side by side and take turns on the same requests. Writes a table, plots
    (PNG, SVG), an HTML report and every raw number to a directory.

    With --host one engine does, on a simulated device that takes no time.
    """
    if host.host:
        _bench_host(asked, host.plan(asked, plan), sweeps, as_json)
        return
    work = plan()
    found, directory = _measure("bench", asked, _candidates(asked, sweeps), work)
    if as_json:
        _print_json(found.as_dict())
        return
    from ascend_opt.proof import text

    text.benchmark(found)
    click.echo(f"Report: {directory / 'report.html'}")


def _bench_host(asked: Asked, plan: HostPlan, sweeps: Sequence[str], as_json: bool) -> None:
    from ascend_opt.proof import plot, report, text
    from ascend_opt.proof.host.bench import host_bench, together
    from ascend_opt.proof.workspace import Progress

    tried = _candidates(asked, sweeps)
    if len(tried) == 1:
        tried = together(tried[0])
    with asked.working("bench", time.strftime("ascend_opt-bench-host-%Y%m%d-%H%M%S")) as workspace:
        found = host_bench(plan, tried, workspace, Progress("bench"))
        workspace.write("result.json", found.as_dict())
        svg = plot.save(found.benchmark, workspace.path)
        workspace.write("report.html", report.html(found.benchmark, svg))
    if as_json:
        _print_json(found.as_dict())
        return
    text.host_benchmark(found)
    click.echo(f"Report: {workspace.path / 'report.html'}")


@click.command()
@options.subject_options
@options.plan_options
@options.as_json
@click.option(
    "--metric",
    "wanted",
    type=click.Choice(["TPOT", "TTFT", "throughput"], case_sensitive=False),
    default="TPOT",
    show_default=True,
    help="What is to be better; none of the three may be worse.",
)
@click.option("--write", "path", type=click.Path(), metavar="FILE", help="Where the YAML goes.")
@options.reporting_errors
def tune(
    asked: Asked,
    plan: Measured,
    sweeps: tuple[str, ...],
    as_json: bool,
    wanted: str,
    path: str | None,
) -> None:
    """Sweep, and write the configuration that measurably wins here, if one does.

    Exit code 0 either way: that nothing wins is an answer too.
    """
    options.writable(path)
    work = plan()
    from ascend_opt.proof import text
    from ascend_opt.proof import tune as tuning
    from ascend_opt.proof.bench import metric
    from ascend_opt.proof.intervals import least_rounds

    tried = _candidates(asked, sweeps)
    least = least_rounds(tuning.confidence_of(len(tried) * len(work.loads)))
    if work.rounds < least:
        raise click.UsageError(
            f"{len(tried)} candidates under {len(work.loads)} loads need --rounds {least} or "
            f"more, found {work.rounds}"
        )
    found, directory = _measure("tune", asked, tried, work)
    choice = tuning.choose(found, metric(wanted))
    yaml = tuning.as_yaml(found, choice, metric(wanted)) if choice.winner else None
    if yaml:
        (directory / "tuned.yaml").write_text(yaml)
        if path:
            Path(path).write_text(yaml)
    if as_json:
        _print_json({**dataclasses.asdict(choice), "yaml": yaml})
        return
    text.benchmark(found)
    for line in choice.lines:
        click.echo(line)
    click.echo(yaml or "Nothing wins here: leave the passes off, or measure with more --rounds.")
    click.echo(f"Report: {directory / 'report.html'}")
