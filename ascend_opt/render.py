"""Tables for people: coloured on a terminal, plain text in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ascend_opt.doctor import Check
from ascend_opt.reporting import Process, Record
from ascend_opt.states import Explanation, Mode, State

_COLOURS = {
    State.ACTIVE: "green",
    State.ARMED: "cyan",
    State.BUILTIN: "green",
    State.OFF: "dim",
    State.INAPPLICABLE: "yellow",
    State.CONFLICT: "red",
    State.FAILED: "red",
    "ok": "green",
    "note": "cyan",
    "fail": "red",
}
_COLOURS |= {s.shown(Mode.SHADOW): _COLOURS[s] for s in (State.ACTIVE, State.ARMED)}

_PIPE_WIDTH = 4096  # columns; rich folds longer lines


def console() -> Console:
    """Return the console of standard output; a pipe gets wide lines, so that none is folded."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a table; a state or outcome in a cell is coloured."""
    lines = box.HEAVY_HEAD if sys.stdout.isatty() else None
    made = Table(title=title, title_justify="left", title_style="bold", box=lines)
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell), style=_COLOURS.get(cell, "")) for cell in row))
    return made


def save_svg(path: str, title: str, tables: Iterable[Table]) -> None:
    """Write tables as a picture of a terminal."""
    with open(os.devnull, "w") as nowhere:
        recorder = Console(record=True, width=130, file=nowhere, highlight=False)
        for made in tables:
            made.box = box.HEAVY_HEAD
            recorder.print(made)
        recorder.save_svg(path, title=title)


def passes(entries: Iterable[dict[str, Any]]) -> Table:
    """Return the table of `list-passes`."""
    return table(
        "Passes",
        ("name", "state", "what it does", "applies when", "origin", "here"),
        (
            (
                entry["name"],
                State(entry["state"]).shown(Mode(entry["mode"])),
                entry["summary"],
                "; ".join(condition["description"] for condition in entry["conditions"]),
                entry["origin"],
                entry["reason"],
            )
            for entry in entries
        ),
    )


def explanation(found: Explanation) -> Group:
    """Return what `explain` prints."""
    words = {True: "ok", False: "fail", None: "note"}
    facts = Text(
        f"{found.name} {found.version} ({found.distribution})\n{found.summary}\n"
        f"origin       {found.origin}\n"
        f"remove when  {found.remove_when}\n"
        f"can shadow   {'yes' if found.can_shadow else 'no'}\n"
        f"here         {found.state.shown(found.mode)}"
        + (f": {found.reason}" if found.reason else "")
    )
    return Group(
        facts,
        table(
            "Conditions",
            ("stage", "holds", "applies when", "found"),
            ((f.stage, words[f.holds], f.description, f.detail) for f in found.findings),
        ),
        table(
            "Targets",
            ("target", "kind", "action", "variant", "source", "fingerprint"),
            (
                (
                    t.target,
                    t.kind,
                    t.action,
                    t.variant or "-",
                    f"{t.file}:{t.line}" if t.file else "-",
                    t.fingerprint or "-",
                )
                for t in found.targets
            ),
        ),
        table("Parameters", ("name", "value"), found.parameters.items()),
    )


def checks(found: Iterable[Check]) -> Table:
    """Return the table of `doctor`."""
    return table(
        "Doctor",
        ("check", "outcome", "found", "what to do"),
        ((c.name, c.outcome, c.found, c.advice) for c in found),
    )


def records(found: Sequence[Record]) -> Table | Text:
    """Return the table of `status`."""
    if not found:
        return Text("No live process of yours has passes.")
    return table(
        "Passes in live processes",
        ("pid", "role", "rank", "pass", "state", "counters", "reason"),
        (
            (
                record.process.pid,
                record.process.role,
                _rank(record.process),
                status.name,
                status.state.shown(status.mode),
                " ".join(f"{key}={value}" for key, value in status.counters.items()),
                status.reason,
            )
            for record in found
            for status in record.passes
        ),
    )


def _rank(process: Process) -> str:
    """Return the rank; before a colon the engine's number, of engines beyond the first."""
    if process.rank is None:
        return "-"
    return f"{process.replica}:{process.rank}" if process.replica else str(process.rank)
