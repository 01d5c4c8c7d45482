"""The command line: `python -m ascend_opt`, or `ascend-opt`.

Exit codes: 0 fine, 1 a check failed, 2 usage. Every command that a script would read has `--json`.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import click

from ascend_opt import config as configuration
from ascend_opt import preview, registry
from ascend_opt.conditions import installed_version
from ascend_opt.config import ENVIRONMENT, Policy, Request
from ascend_opt.errors import AscendOptError, ConfigError, NotApplicableError
from ascend_opt.states import Explanation, State


class _Group(click.Group):
    """Imports the commands of the larger parts when one of them is called."""

    _PARTS: ClassVar[dict[str, str]] = {
        "compat": "ascend_opt.compat.cli",
        "simnpu": "ascend_opt.simnpu.cli",
        **dict.fromkeys(("verify", "bisect", "bench", "tune"), "ascend_opt.proof.cli"),
    }

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *self._PARTS])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in self._PARTS:
            command: click.Command = getattr(importlib.import_module(self._PARTS[name]), name)
            return command
        return super().get_command(context, name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ascend-opt")
def main() -> None:
    """Optimization passes for an installed vLLM / vllm-ascend: list, explain, run, check."""


def _reporting_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn our errors into one line and an exit code."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AscendOptError as error:
            click.echo(f"Error: {error}", err=True)
            raise SystemExit(1 if isinstance(error, NotApplicableError) else 2) from None

    return wrapped


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _print_rich(value: Any) -> None:
    from ascend_opt.render import console

    console().print(value)


@main.command("list-passes")
@_as_json
@_reporting_errors
def list_passes(as_json: bool) -> None:
    """List the installed passes, and what each would be here."""
    config = preview.inherited()
    entries = [_entry(*preview.explain(name, config)) for name in registry.discover().classes()]
    if as_json:
        _print_json(entries)
        return
    from ascend_opt import render

    _print_rich(render.passes(entries))


def _entry(found: Explanation, asked: bool) -> dict[str, Any]:
    """Return what `list-passes` says of a pass."""
    state, reason = found.state, found.reason
    if not asked and state is not State.OFF:
        would = f"{state}: {reason}" if reason else state
        state, reason = State.OFF, f"not enabled; here it would be {would}"
    return {
        "name": found.name,
        "state": state,
        "mode": found.mode,
        "can_shadow": found.can_shadow,
        "reason": reason,
        "summary": found.summary,
        "origin": found.origin,
        "conditions": [
            {"name": f.name, "stage": f.stage, "description": f.description} for f in found.findings
        ],
        "parameters": found.parameters,
        "version": found.version,
        "distribution": found.distribution,
    }


@main.command()
@click.argument("name", metavar="PASS")
@_as_json
@_reporting_errors
def explain(name: str, as_json: bool) -> None:
    """Show every condition of a pass and every target that it would touch."""
    found, _ = preview.explain(name, preview.inherited())
    if as_json:
        _print_json(found.as_dict())
        return
    from ascend_opt import render

    _print_rich(render.explanation(found))


@main.command()
@_as_json
def doctor(as_json: bool) -> None:
    """Check why a pass might silently not be on; exit 1 if something is wrong."""
    from ascend_opt import doctor as examination

    found = examination.examine()
    if as_json:
        _print_json([vars(check) for check in found])
    else:
        from ascend_opt import render

        _print_rich(render.checks(found))
    if any(check.outcome is examination.Outcome.FAIL for check in found):
        raise SystemExit(1)


@main.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--enable",
    "enables",
    multiple=True,
    metavar="PASS[:key=value,...]",
    help="Switch a pass on; an error if it cannot be on here.",
)
@click.option("--config", "path", type=click.Path(), help="A YAML configuration.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@_reporting_errors
def run(enables: tuple[str, ...], path: str | None, command: tuple[str, ...]) -> None:
    """Run COMMAND (after --) with passes on in all of its vLLM processes."""
    from ascend_opt.doctor import filtered_out

    if not enables and path is None:
        raise click.UsageError("nothing to switch on: give --enable PASS or --config FILE")
    allowed = filtered_out()
    if allowed is not None:
        raise click.UsageError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading ascend_opt, so no pass would be "
            "on; add 'ascend_opt' to it"
        )
    if preview.inherited().off:
        raise click.UsageError(f"{ENVIRONMENT}=off keeps every pass off; unset it first")
    classes = registry.discover().classes()
    policy = Policy.SKIP
    requests: dict[str, Request] = {}
    if path is not None:
        config = configuration.from_file(path, classes)
        policy = config.policy
        requests = {request.name: request for request in config.requests}
        if policy is Policy.STRICT:
            preview.require(list(requests.values()))
    named = [preview.parse_enable(text) for text in enables]
    preview.require(named)
    requests |= {request.name: request for request in named}
    os.environ[ENVIRONMENT] = configuration.dump(requests, policy)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise click.UsageError(f"cannot run {shlex.join(command)}: {error.strerror}") from None


@main.command()
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
@_as_json
@_reporting_errors
def status(watch: bool, as_json: bool) -> None:
    """Show the passes in all live processes of this user."""
    from ascend_opt import reporting

    if as_json:
        _print_json([record.as_dict() for record in reporting.read_records()])
        return
    from ascend_opt import render

    if not watch:
        _print_rich(render.records(reporting.read_records()))
        return
    from rich.live import Live

    with Live(console=render.console(), auto_refresh=False) as live:
        try:
            while True:
                live.update(render.records(reporting.read_records()), refresh=True)
                time.sleep(reporting.INTERVAL_S)
        except KeyboardInterrupt:
            return


@main.group("config")
def config_group() -> None:
    """Check configurations, and print their schema."""


@config_group.command()
@click.argument("path", type=click.Path())
@_as_json
def check(path: str, as_json: bool) -> None:
    """Check a YAML configuration; exit 1 with the place if it is wrong."""
    try:
        found = configuration.from_file(path, registry.discover().classes())
    except ConfigError as error:
        if as_json:
            _print_json({"path": path, "valid": False, "error": str(error)})
        else:
            click.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from None
    passes = {request.name: request.as_plain() for request in found.requests}
    if as_json:
        _print_json({"path": path, "valid": True, "policy": found.policy, "passes": passes})
        return
    click.echo(f"{path}: valid, policy {found.policy}")
    for name, entry in passes.items():
        click.echo(f"  {name}: " + ", ".join(f"{key}={value}" for key, value in entry.items()))


@config_group.command()
@click.option("--json", "_", is_flag=True, hidden=True)
def schema(_: bool) -> None:
    """Print the JSON schema of a configuration with the installed passes."""
    _print_json(configuration.schema(registry.discover().classes()))


@main.command()
@click.option(
    "--on",
    "place",
    type=click.Choice(["auto", "npu", "cpu"]),
    default="auto",
    help="npu: vllm-ascend on the simulated driver; cpu: vLLM's CPU build. Default: what is there.",
)
@click.option("--svg", type=click.Path(dir_okay=False), help="Also write the tables as a picture.")
@_as_json
@_reporting_errors
def demo(place: str, svg: str | None, as_json: bool) -> None:
    """Run a tiny Qwen3 in the installed vLLM, unpatched and with the passes; compare tokens."""
    from ascend_opt import demo as demonstration

    def say(line: str) -> None:
        click.echo(line, err=True)

    if place == "auto":
        place = "cpu" if installed_version("vllm-ascend") is None else "npu"
    found = demonstration.demonstrate(place, say)
    if as_json:
        _print_json(found.as_dict())
    else:
        from ascend_opt import render

        tables = [render.table(title, headings, rows) for title, headings, rows in found.tables()]
        for table in tables:
            _print_rich(table)
        click.echo(found.note)
        if svg is not None:
            render.save_svg(svg, "python -m ascend_opt demo", tables)
    if not found.equal:
        raise SystemExit(1)
