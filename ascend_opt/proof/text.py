"""What people read on standard output."""

from __future__ import annotations

from collections.abc import Mapping

from ascend_opt.proof.bench import Benchmark
from ascend_opt.proof.bisect import Bisection
from ascend_opt.proof.report import by_chance, rows
from ascend_opt.proof.verify import Verdict, Verification
from ascend_opt.render import console, table

_SHOWN = 5  # differences; the rest is in --json


def _listed(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in counts.items()) or "-"


def verification(found: Verification) -> None:
    """Print what `verify` found."""
    out = console()
    rows = [
        (
            item.name,
            "fail" if item.problem else "ok",
            _listed(item.states),
            _listed(item.counters),
            item.problem or "",
        )
        for item in found.activity
    ]
    if rows:
        out.print(
            table("Was it on?", ("pass", "on", "processes", "counters", "what is wrong"), rows)
        )
    if found.noise is not None and found.patched is not None:
        out.print(
            table(
                "Is it right?",
                ("compared with the first unpatched run", "tokens equal", "largest logprob gap"),
                [
                    (name, f"{c.tokens_equal} of {c.tokens}", _gap(c.max_logprob_difference))
                    for name, c in (
                        ("unpatched again (the noise floor)", found.noise),
                        ("with the passes", found.patched),
                    )
                ],
            )
        )
    for difference in found.blamed()[:_SHOWN]:
        out.print(str(difference), markup=False)
    if found.verdict is Verdict.NOTHING_ON:
        out.print("Tokens were not compared: without all passes on, equal would say nothing.")
    if found.log:
        out.print(found.log, markup=False)
    word = "PASS" if found.passed else "FAIL"
    out.print(f"{word}: {found.verdict}: {found.reason}", markup=False)


def bisection(found: Bisection) -> None:
    """Print what `bisect` found."""
    out = console()
    for trial in found.trials:
        out.print(str(trial), markup=False)
    if found.passes:
        out.print(f"CULPRIT: {found.reason}", markup=False)
        out.print(found.last, markup=False)
    else:
        out.print(f"NO CULPRIT: {found.reason}", markup=False)


def benchmark(found: Benchmark) -> None:
    """Print what `bench` measured."""
    out = console()
    lines = rows(found.cells)
    headings = ("candidate", "load", "metric", "off", "on", "change", "interval", "what it says")
    out.print(
        table(
            "Does it pay?",
            headings,
            [
                (
                    row.candidate,
                    row.load,
                    f"{row.metric}, {row.unit}",
                    f"{row.off} (spread {row.off_spread})",
                    f"{row.on} (spread {row.on_spread})",
                    row.change,
                    row.interval,
                    "no difference seen" if row.verdict == "same" else row.verdict,
                )
                for row in lines
            ],
        )
    )
    out.print(by_chance(len(lines)))
    for note in found.notes:
        out.print(note, markup=False)


def _gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
