"""A benchmark as rows of text, and as one HTML file that can be attached to an issue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ascend_opt.proof.bench import Benchmark, Cell, metric
from ascend_opt.proof.intervals import CONFIDENCE, Paired, percent, sentence

_TEMPLATE = Path(__file__).with_name("report.html.j2")


@dataclass(frozen=True)
class Row:
    """One metric of one candidate under one load, as text; `verdict` is better, worse or same."""

    candidate: str
    load: str
    metric: str
    unit: str
    off: str
    off_spread: str
    on: str
    on_spread: str
    change: str
    interval: str
    verdict: str
    sentence: str


def rows(cells: Iterable[Cell]) -> list[Row]:
    """Return one row for each metric of each cell."""
    found = []
    for cell in cells:
        for name, compared in cell.compared().items():
            kind = metric(name, cell.method_unit)
            found.append(
                Row(
                    candidate=cell.candidate,
                    load=str(cell.load),
                    metric=name,
                    unit=kind.unit,
                    off=_number(compared.off),
                    off_spread=_number(compared.off_spread),
                    on=_number(compared.on),
                    on_spread=_number(compared.on_spread),
                    change=percent(compared.ratio),
                    interval=f"{percent(compared.low)} to {percent(compared.high)}",
                    verdict=verdict(compared, kind.higher_is_better),
                    sentence=sentence(name, compared, higher_is_better=kind.higher_is_better),
                )
            )
    return found


def by_chance(count: int) -> str:
    """Return what to keep in mind when reading many intervals at once."""
    return (
        f"{count} intervals of {CONFIDENCE:.0%}: where nothing differs, about "
        f"{count * (1 - CONFIDENCE):.1f} of them would still exclude 0%."
    )


def verdict(compared: Paired, higher_is_better: bool) -> str:
    """Return `same` where no difference was seen, else `better` or `worse`."""
    if not compared.differs:
        return "same"
    return "better" if (compared.low > 1) is higher_is_better else "worse"


def html(found: Benchmark, svg: str) -> str:
    """Return a page that needs nothing beside it.

    Args:
        found: The benchmark.
        svg: Its plot.
    """
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE.read_text())
    lines = rows(found.cells)
    page: str = template.render(
        labels=list(found.passes),
        rows=lines,
        by_chance=by_chance(len(lines)),
        svg=svg,
        setup=found.setup,
        facts=found.facts,
        activity=found.activity,
        notes=found.notes,
        passes=json.dumps(found.passes, indent=1),
        raw=json.dumps(found.as_dict()["cells"], indent=1),
    )
    return page


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
