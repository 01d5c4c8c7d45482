"""Plots of a benchmark: the change under each load, with its interval."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ascend_opt.proof.bench import HOST_METRICS, METRICS, Benchmark, metric


def draw(found: Benchmark) -> Any:
    """Return a matplotlib figure: a panel for each metric, a colour for each candidate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    loads = list(dict.fromkeys(str(cell.load) for cell in found.cells))
    labels = list(found.passes)
    known = (*METRICS, *HOST_METRICS)
    names = [n for n in known if any(n in cell.off for cell in found.cells)]
    width = max(4.0, 1.2 + 0.35 * len(loads) * len(labels))
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(width * len(names), 4.2), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        better = "higher" if metric(name).higher_is_better else "lower"
        axis.axhline(0, color="0.5", linewidth=1)
        for number, label in enumerate(labels):
            shift = (number - (len(labels) - 1) / 2) * 0.6 / max(len(labels), 1)
            points = [
                (loads.index(str(cell.load)) + shift, cell.compared()[name])
                for cell in found.cells
                if cell.candidate == label and name in cell.compared()
            ]
            axis.errorbar(
                [x for x, _ in points],
                [100 * (p.ratio - 1) for _, p in points],
                yerr=[
                    [max(0.0, 100 * (p.ratio - p.low)) for _, p in points],
                    [max(0.0, 100 * (p.high - p.ratio)) for _, p in points],
                ],
                fmt="o",
                capsize=3,
                label=label,
            )
        axis.set_xticks(range(len(loads)), loads, rotation=30, ha="right")
        axis.set_xlabel(found.setup.get("loads", "requests x input+output tokens"))
        axis.set_title(f"{name} ({better} is better)", fontsize=10)
        axis.set_ylabel("change with the passes, %")
    # Once for all panels, above them, where it covers no point.
    handles, texts = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside upper center", ncols=4, fontsize=8)
    return figure


def save(found: Benchmark, directory: Path) -> str:
    """Write `plot.png` and `plot.svg`; return the SVG's text."""
    from matplotlib import pyplot

    figure = draw(found)
    figure.savefig(directory / "plot.png", dpi=150)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    svg = text.getvalue()
    (directory / "plot.svg").write_text(svg)
    return svg[svg.index("<svg") :]  # without the XML declaration, to stand inside a page
