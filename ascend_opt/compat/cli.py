"""The command line of the compatibility check."""

from __future__ import annotations

import json

import click
from rich.text import Text

from ascend_opt.compat.check import Report, check
from ascend_opt.recognition import Action


@click.group()
def compat() -> None:
    """Check what of the installed vLLM and vllm-ascend the passes recognise."""


@compat.command("check")
@click.option(
    "--fetch",
    is_flag=True,
    help="Show each unknown source as a diff from the nearest known one; gets the source of "
    "released versions with pip.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def check_command(fetch: bool, as_json: bool) -> None:
    """Look every target up on disk; exit 1 if a pass stays off over a source that has changed.

    Reads files and imports nothing, so nightlies and local edits are judged by what they hold.
    """
    found = check(fetch, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found, fetch)
    if not found.sound:
        raise SystemExit(1)


def _show(found: Report, fetched: bool) -> None:
    from ascend_opt import render

    console = render.console()
    versions = (f"{name} {version or 'not installed'}" for name, version in found.versions.items())
    console.print(Text("  ".join(versions)))
    if not any(found.versions.values()):
        console.print(Text("Nothing to check: run this with the Python that runs vLLM."))
        return
    console.print(
        render.table(
            "Recognised",
            ("pass", "with these sources", "target", "is", "where", "fingerprint"),
            (
                (
                    one.name,
                    one.state,
                    target.target,
                    target.variant
                    or ("absent" if target.action == Action.LEAVE else target.action),
                    f"{target.file}:{target.line}" if target.file else "-",
                    target.fingerprint or "-",
                )
                for one in found.passes
                for target in one.targets
            ),
        )
    )
    for one in found.passes:
        if one.reason:
            console.print(Text(f"{one.name}: {one.state}: {one.reason}"))
        for target in one.targets:
            if target.action != Action.UNKNOWN:
                continue
            near = one.nearest.get(target.target)
            if near is not None:
                share = f"{near.similarity:.0%} like {near.release} ({near.variant})"
                console.print(Text(f"\n{target.target}: {share}\n{near.diff}"))
            elif not fetched:
                console.print(Text("compat check --fetch shows the diff from the nearest release."))
