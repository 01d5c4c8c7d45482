"""The command line of simnpu."""

import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.table import Table

from ascend_opt.simnpu import launch, selftests, trace
from ascend_opt.simnpu.build import BuildError, build_driver, cache_root
from ascend_opt.simnpu.installation import Installation, prepare
from ascend_opt.simnpu.releases import RELEASES, ReleaseError, find_release, installed_versions
from ascend_opt.simnpu.schemas import SchemaError

_FAILED, _USAGE = 1, 2

release_option = click.option(
    "--release", metavar="R", help="Fail unless this vllm-ascend release is the installed one."
)
deliver_option = click.option(
    "--deliver",
    type=click.Choice(["late", "now"]),
    default="late",
    show_default=True,
    help="When queued work takes effect: as late as it may, or at once.",
)
compute_option = click.option(
    "--compute",
    type=click.Choice(["full", "none"]),
    default="full",
    show_default=True,
    help="none: kernels return at once, with the right shapes and no true values.",
)


@click.group()
def simnpu() -> None:
    """Run vllm-ascend on this CPU, over a simulated Ascend driver."""


@simnpu.command(context_settings={"ignore_unknown_options": True})
@release_option
@deliver_option
@compute_option
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every driver call of every process to this file, for Perfetto.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    release: str | None,
    deliver: launch.Delivery,
    compute: launch.Compute,
    trace_file: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND (after --) with the simulated device under it."""
    installation = _prepare(release)
    if compute == "none":
        click.echo("simnpu: computing nothing: no token of this run is a true one", err=True)
    if trace_file is None:
        environ = launch.environment(installation, os.environ, deliver, compute=compute)
        raise SystemExit(_run(command, environ))
    with tempfile.TemporaryDirectory(prefix="simnpu-trace-") as directory:
        environ = launch.environment(installation, os.environ, deliver, Path(directory), compute)
        code = _run(command, environ)
        count = trace.export(Path(directory), trace_file)
    click.echo(f"{count} driver records in {trace_file}: open it in ui.perfetto.dev", err=True)
    raise SystemExit(code)


@simnpu.command()
@release_option
def setup(release: str | None) -> None:
    """Build the driver and the operator library once, and check versions."""
    installation = _prepare(release)
    table = Table(title=f"simnpu for vllm-ascend {installation.release.name}", show_header=False)
    for name in ("driver", "dispatch", "schemas", "metadata"):
        table.add_row(name, str(getattr(installation, name)))
    _print(table)


@simnpu.command()
def doctor() -> None:
    """Say what is and is not supported on this machine."""
    table = Table(title="simnpu on this machine")
    for column in ("what", "found", "needed", ""):
        table.add_column(column)
    rows = _findings()
    for what, found, needed, good in rows:
        table.add_row(what, found, needed, "ok" if good else "MISSING")
    _print(table)
    if not all(good for *_, good in rows):
        raise SystemExit(_FAILED)


@simnpu.command()
@release_option
def selftest(release: str | None) -> None:
    """Run a correct program and three faulty ones, and see that the faults show."""
    installation = _prepare(release)
    verdicts = selftests.run_all(installation)
    table = Table(title="simnpu selftest (late delivery)")
    for column in ("program", "result", "expected", ""):
        table.add_column(column)
    for verdict in verdicts:
        table.add_row(
            verdict.program, verdict.result, verdict.expected, "ok" if verdict.good else "FAILED"
        )
    _print(table)
    if not all(verdict.good for verdict in verdicts):
        raise SystemExit(_FAILED)


def _prepare(release: str | None) -> Installation:
    try:
        return prepare(release)
    except (ReleaseError, BuildError, SchemaError) as error:
        _fail(str(error))


def _run(command: tuple[str, ...], environ: dict[str, str]) -> int:
    # "python" means the Python that has the packages, whatever PATH says.
    program = sys.executable if command[0] in ("python", "python3") else command[0]
    beside = Path(sys.executable).parent / program
    if not shutil.which(program) and beside.exists():
        program = str(beside)
    if not shutil.which(program):
        _fail(f"{command[0]}: no such program on PATH or beside {sys.executable}", _USAGE)
    return launch.run([program, *command[1:]], environ)


def _findings() -> list[tuple[str, str, str, bool]]:
    machine = f"{platform.system()} {platform.machine()}"
    python = platform.python_version()
    rows = [
        ("machine", machine, "Linux x86_64", machine == "Linux x86_64"),
        ("Python", python, "3.11", python.startswith("3.11.")),
    ]
    for compiler in ("gcc", "g++"):
        found = shutil.which(compiler)
        rows.append((compiler, found or "not on PATH", "any recent", found is not None))
    try:
        release = find_release()
        rows.append(("packages", f"vllm-ascend {release.name}", "a supported set", True))
    except ReleaseError as error:
        rows.append(("packages", str(error), "a supported set", False))
        wanted = RELEASES[0].packages
        for name, version in installed_versions().items():
            rows.append((f"  {name}", version or "not installed", wanted[name], bool(version)))
    try:
        rows.append(("driver", str(build_driver()), f"built in {cache_root()}", True))
    except BuildError as error:
        rows.append(("driver", str(error), "builds", False))
    return rows


def _print(table: Table) -> None:
    # A pipe has no width of its own: let no column be cut.
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)


def _fail(message: str, code: int = _FAILED) -> NoReturn:
    click.echo(f"simnpu: {message}", err=True)
    raise SystemExit(code)
