"""tune: of the candidates of a sweep, the configuration that measurably wins here.

A candidate wins if its metric is better beyond doubt under one load at least, and no metric is
worse beyond doubt under any. Many candidates under many loads give chance many tries, so the
intervals are widened by their number (Bonferroni): what wins would win by chance in less than one
sweep out of twenty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from ascend_opt.proof.bench import METRICS, Benchmark, Cell, Metric
from ascend_opt.proof.intervals import CONFIDENCE, Paired, percent
from ascend_opt.proof.report import verdict


@dataclass(frozen=True)
class Choice:
    """What `tune` decided.

    Attributes:
        winner: Label of the winning candidate; None if nothing wins.
        passes: Its passes, as in a configuration.
        lines: One sentence for each candidate.
        confidence: Of the widened intervals.
    """

    winner: str | None
    passes: dict[str, Any]
    lines: tuple[str, ...]
    confidence: float


def confidence_of(cells: int) -> float:
    """Return the confidence that each interval of so many candidates and loads must have."""
    return 1 - (1 - CONFIDENCE) / max(cells * len(METRICS), 1)


def choose(found: Benchmark, wanted: Metric) -> Choice:
    """Choose the winning candidate of a sweep.

    Args:
        found: The sweep.
        wanted: The metric that is to be better.
    """
    confidence = confidence_of(len(found.cells))
    best: tuple[float, str] | None = None
    lines = []
    for label in found.passes:
        cells = [cell for cell in found.cells if cell.candidate == label]
        gain, line = _judge(label, cells, wanted, confidence)
        lines.append(line)
        if gain is not None and (best is None or gain > best[0]):
            best = gain, label
    if best is None:
        return Choice(None, {}, tuple(lines), confidence)
    return Choice(best[1], found.passes[best[1]], tuple(lines), confidence)


def _judge(
    label: str, cells: list[Cell], wanted: Metric, confidence: float
) -> tuple[float | None, str]:
    """Return the mean gain of a candidate if it wins, and what there is to say of it."""
    compared = [(cell, cell.compared(confidence)) for cell in cells]
    worse = [
        f"{name} {_words(found[name])} at {cell.load}"
        for cell, found in compared
        for name in METRICS
        if name in found and verdict(found[name], METRICS[name].higher_is_better) == "worse"
    ]
    better = [
        f"{wanted.name} {_words(found[wanted.name])} at {cell.load}"
        for cell, found in compared
        if wanted.name in found and verdict(found[wanted.name], wanted.higher_is_better) == "better"
    ]
    if worse:
        return None, f"{label}: loses: {'; '.join(worse)}"
    if not better:
        return None, f"{label}: no difference seen in {wanted.name}"
    sign = 1 if wanted.higher_is_better else -1
    ratios = [found[wanted.name].ratio for _, found in compared if wanted.name in found]
    gain = sign * sum(map(math.log, ratios)) / len(ratios)
    return gain, f"{label}: wins: {'; '.join(better)}"


def _words(found: Paired) -> str:
    return f"{percent(found.ratio)} ({percent(found.low)} to {percent(found.high)})"


def as_yaml(found: Benchmark, choice: Choice, wanted: Metric) -> str:
    """Return the winning configuration with the figures behind it in comments."""
    facts = found.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    how = f"{found.setup['rounds']} pairs of rounds; changes against no passes, medians, with"
    head = [
        f"Chosen by `ascend_opt tune` for {wanted.name}: {choice.winner}.",
        f"Model {facts['engine']['model']} on {facts['device']}.",
        f"{versions}.",
        f"{how} {choice.confidence:.2%} intervals.",
        "Loads are requests x input+output tokens.",
        *choice.lines,
        "Measured on this machine and model only: measure again on another.",
    ]
    comment = "".join(f"# {line}\n" for line in head)
    text: str = yaml.safe_dump({"version": 1, "passes": choice.passes}, sort_keys=False)
    return comment + text
