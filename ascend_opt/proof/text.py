"""What people read on standard output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from ascend_opt.proof.bench import HOST_METRICS, Benchmark
from ascend_opt.proof.bisect import Bisection
from ascend_opt.proof.host.bench import HostBenchmark, HostCell
from ascend_opt.proof.host.profiling import Profile
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
    for what, path in found.traces.items():
        out.print(f"Trace for ui.perfetto.dev, {what}: {path}", markup=False, soft_wrap=True)


def host_benchmark(found: HostBenchmark) -> None:
    """Print what `bench --host` measured."""
    out = console()
    setup, versions = found.benchmark.setup, found.benchmark.facts["versions"]
    where = f"vllm-ascend {versions.get('vllm-ascend')}, {setup['shapes']}"
    headings = ("candidate", "requests", "what", "off, ms", "on, ms", "saved, ms", "change")
    out.print(
        table(
            f"Host time of a decode step: {where} ({setup['rounds']} pairs)",
            (*headings, "interval", "what it says"),
            [line for cell in found.cells for line in _host_lines(cell)],
        )
    )
    calls = [
        (cell.candidate, cell.load, kind, f"{off:g}", f"{on:g}")
        for cell in found.cells
        for kind, (off, on) in cell.changed_calls().items()
    ]
    if calls:
        title = "Driver calls of a step that the passes change (median)"
        out.print(table(title, ("candidate", "requests", "call", "off", "on"), calls))
    for profile in found.profiles:
        out.print(_profile(profile))
    out.print(by_chance(sum(len(cell.compared()) for cell in found.cells)))
    out.print(f"The engine's process took {found.peak_gib:.1f} GiB of memory at most.")
    for note in found.benchmark.notes:
        out.print(note, markup=False)


def _host_lines(cell: HostCell) -> Iterator[tuple[str, ...]]:
    compared = cell.compared()
    for row in rows([cell]):
        paired = compared[row.metric]
        off, on = f"{paired.off:.3f}", f"{paired.on:.3f}"
        if row.metric not in HOST_METRICS:
            shares = cell.shares(row.metric)
            off, on = (f"{ms} ({100 * s:.1f}%)" for ms, s in zip((off, on), shares, strict=True))
        yield (
            row.candidate,
            row.load,
            row.metric.partition(":")[2] or row.metric,
            off,
            on,
            f"{cell.saved_ms(row.metric):+.3f}",
            row.change,
            row.interval,
            "no difference seen" if row.verdict == "same" else row.verdict,
        )


def _profile(found: Profile) -> Table:
    title = (
        f"What is left with {found.passes}: {found.load}, {found.few} and {found.many} requests "
        f"(profiled steps of {found.few_ms:.1f} and {found.many_ms:.1f} ms)"
    )
    few, many = f"own ms, {found.few}", f"own ms, {found.many}"
    return table(
        title,
        ("grows", "function", "where", few, many, "of the step", "us a request", "with callees"),
        [
            (
                "yes" if cost.grows else "",
                cost.function,
                cost.place,
                f"{cost.few.own_ms:.3f}",
                f"{cost.many.own_ms:.3f}",
                f"{100 * cost.share:.1f}%",
                f"{cost.per_request_us:.2f}",
                f"{cost.many.total_ms:.3f}",
            )
            for cost in found.costs
        ],
    )


def _gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
