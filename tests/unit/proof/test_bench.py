"""bench and tune from end to end on the light vLLM, whose `fast` pass skips 20 ms a step."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from ascend_opt.errors import ParameterError, UnknownPassError
from ascend_opt.proof.bench import METRICS, TPOT, Benchmark, Cell, Load, measured
from ascend_opt.proof.engine_run import Batch, Generated
from ascend_opt.proof.report import html, rows
from ascend_opt.proof.sweep import SweepError, candidates, loads
from ascend_opt.proof.tune import as_yaml, choose

Invoke = Callable[..., Result]
pytest_plugins = ("light",)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_opt.proof.bench.SETTLE_S", 0.0)


QUICK = ("--num-requests=2", "--input-len=4", "--output-len=3")
SLOW_ENGINE = ("--", "--work-s", "0.02")


def test_a_pass_that_saves_time_is_seen_to(light_vllm: Invoke, tmp_path: Path) -> None:
    """TPOT is lower beyond doubt, in the method that was patched too; every output is written."""
    result = light_vllm("bench", "--enable=fast", *QUICK, "--output=out", "--json", *SLOW_ENGINE)
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(result.stdout)["cells"]
    assert cell["compared"]["TPOT"]["high"] < 0.5
    assert cell["compared"]["vllm.model:Runner.prepare"]["high"] < 0.5
    assert len(cell["off"]["TPOT"]) == len(cell["on"]["TPOT"]) == 12
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"result.json", "report.html", "plot.png", "plot.svg", "rounds.jsonl"}
    order = [json.loads(x)["arm"] for x in (tmp_path / "out" / "rounds.jsonl").open()]
    assert order == ["off", "on"] * 12


def test_engines_in_turn_measure_the_same(light_vllm: Invoke, tmp_path: Path) -> None:
    """Where there is no room for two engines, one at a time gives every pair and trace as well."""
    result = light_vllm(
        *("bench", "--enable=fast", *QUICK, "--in-turn", "--rounds=6", "--trace=traces", "--json"),
        *SLOW_ENGINE,
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (cell,) = found["cells"]
    assert len(cell["off"]["TPOT"]) == len(cell["on"]["TPOT"]) == 6
    assert cell["compared"]["TPOT"]["high"] < 0.5
    directory = tmp_path / "traces"
    assert not found["notes"]
    assert found["traces"] == {
        "unpatched": str(directory / "off.json"),
        "fast": str(directory / "on.json"),
    }
    for path in found["traces"].values():
        events = json.loads(Path(path).read_text())["traceEvents"]
        assert sum(e["name"] == "ascend_opt: fast: Runner.prepare" for e in events) == 2
        assert f"{path}\n" in result.stderr


def test_what_is_not_on_is_not_measured(light_vllm: Invoke) -> None:
    """A pass that never ran has no figures: exit 1 with the reason."""
    result = light_vllm("bench", "--enable=idle", *QUICK, "--rounds=6")
    assert result.exit_code == 1
    assert "nothing to measure with idle" in result.stderr


def test_a_second_engine_without_room_gets_advice(light_vllm: Invoke) -> None:
    """If the engine beside the unpatched one dies, the error says how to make room."""
    result = light_vllm("bench", "--enable=crash-at-start", *QUICK)
    assert result.exit_code == 2
    assert "--gpu-memory-utilization 0.45), or say --in-turn" in result.stderr


def test_a_sweep_has_a_cell_for_each_value_and_load(light_vllm: Invoke) -> None:
    """Every candidate meets every load."""
    result = light_vllm(
        *("bench", "--enable=fast", "--sweep=fast.speed=1,2", "--rounds=6", "--json"),
        *("--num-requests=1,2", "--input-len=4", "--output-len=2"),
    )
    assert result.exit_code == 0, result.output
    cells = json.loads(result.stdout)["cells"]
    assert [(c["candidate"], c["load"]["num_requests"]) for c in cells] == [
        ("speed=1", 1),
        ("speed=1", 2),
        ("speed=2", 1),
        ("speed=2", 2),
    ]


def test_tune_writes_what_wins(light_vllm: Invoke, tmp_path: Path) -> None:
    """The YAML is a configuration that can be loaded, with the figures in its comments."""
    result = light_vllm(
        *("tune", "--sweep=fast.speed=1,2", *QUICK, "--write=tuned.yaml", *SLOW_ENGINE)
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "tuned.yaml").read_text()
    assert yaml.safe_load(text)["passes"]["fast"]["speed"] in (1, 2)
    assert "# speed=1: wins: TPOT -" in text


def test_tune_says_so_when_nothing_wins(light_vllm: Invoke, tmp_path: Path) -> None:
    """A pass that changes nothing is not written down as a winner."""
    result = light_vllm("tune", "--enable=right", *QUICK, "--write=tuned.yaml", *SLOW_ENGINE)
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "tuned.yaml").exists()
    assert "Nothing wins here" in result.stdout


def test_tune_wants_rounds_enough_for_its_candidates(light_vllm: Invoke) -> None:
    """Many candidates need wider intervals, and those more rounds: said before any engine."""
    result = light_vllm("tune", "--sweep=fast.speed=1,2,3,4,5,6", *QUICK, "--rounds=6")
    assert result.exit_code == 2
    assert "need --rounds 10 or more" in result.stderr


def test_an_interrupt_keeps_the_rounds_so_far(
    light_vllm: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C half-way: exit 130, and the rounds that were measured are named."""
    from ascend_opt.proof import bench

    keep = bench._Bench.keep

    def interrupted(self: Any, *arguments: Any) -> None:
        keep(self, *arguments)
        if self._done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench._Bench, "keep", interrupted)
    result = light_vllm("bench", "--enable=fast", *QUICK, "--output=out")
    assert result.exit_code == 130
    assert "rounds.jsonl" in result.stderr.rpartition("Kept in ")[2]
    assert len((tmp_path / "out" / "rounds.jsonl").read_text().splitlines()) == 3


def test_the_metrics_of_a_batch() -> None:
    """TPOT counts the gaps between tokens, not the first; throughput counts every token."""
    answers = [
        Generated([1, 2, 3], [], 4, first_s=0.5, last_s=0.7),
        Generated([1, 2, 3], [], 4, first_s=0.7, last_s=1.1),
    ]
    found = measured(Batch(answers, wall_s=2.0))
    assert found == pytest.approx({"TPOT": 150.0, "TTFT": 600.0, "throughput": 3.0})
    single = Batch([Generated([1], [], 4, 0.5, 0.5)], wall_s=1.0)
    assert "TPOT" not in measured(single)


@pytest.mark.parametrize(
    "text", ["fast=1", "fast.speed", "fast.speed=", "fast.speed=1,,2", ".speed=1", "=1"]
)
def test_a_sweep_of_another_form_is_refused(text: str) -> None:
    """The error shows an example."""
    with pytest.raises(SweepError, match=r"expected PASS\.PARAMETER=VALUE"):
        candidates({}, [text])


def test_a_sweep_is_checked_like_any_configuration() -> None:
    """An unknown pass, parameter or value is refused before anything runs."""
    with pytest.raises(UnknownPassError):
        candidates({}, ["mlp-prefech.down_bytes=0"])
    with pytest.raises(ParameterError, match="did you mean 'down_bytes'"):
        candidates({}, ["mlp-prefetch.down_byte=0"])
    with pytest.raises(ParameterError, match="18XB"):
        candidates({}, ["mlp-prefetch.down_bytes=18XB"])


def test_sweeps_multiply() -> None:
    """Two swept parameters give every combination, labelled by their values."""
    found = candidates({}, ["mlp-prefetch.down_bytes=0,4MiB", "mlp-prefetch.backend=record,npu"])
    assert [candidate.label for candidate in found] == [
        "down_bytes=0 backend=record",
        "down_bytes=0 backend=npu",
        "down_bytes=4MiB backend=record",
        "down_bytes=4MiB backend=npu",
    ]
    assert found[2].requests["mlp-prefetch"].parameters.down_bytes == 4 << 20


@pytest.mark.parametrize("text", ["0", "1,x", "", "1,-2", "1.5"])
def test_loads_are_whole_numbers(text: str) -> None:
    """Anything else is refused by name."""
    with pytest.raises(SweepError, match="--num-requests"):
        loads(text, "128", 8)


def made(*cells: tuple[str, int, float, float]) -> Benchmark:
    """Return a benchmark of candidates with a load and the ratios of TPOT and TTFT."""
    wobble = [1 + 0.002 * math.sin(n) for n in range(16)]
    built = []
    for label, num_requests, tpot, ttft in cells:
        cell = Cell(label, Load(num_requests, 8, 8))
        for n, w in enumerate(wobble):
            off = {"TPOT": 10 * w, "TTFT": 50 * w, "throughput": 100 / w}
            on_w = wobble[-1 - n]
            on = {"TPOT": 10 * tpot * on_w, "TTFT": 50 * ttft * on_w, "throughput": 100 / on_w}
            cell.add("off", off)
            cell.add("on", on)
        built.append(cell)
    facts = {"versions": {"vllm": "1"}, "device": "D", "engine": {"model": "m"}}
    setup = {
        "rounds": 16,
        "warm_up_rounds": 2,
        "engines": "side by side",
        "confidence": 0.95,
        "arguments": [],
    }
    passes = {label: {"fast": {"label": label}} for label, *_ in cells}
    return Benchmark(tuple(built), passes, {}, facts, setup)


def test_the_largest_gain_wins() -> None:
    """Of two candidates that are better, the one with the larger mean gain is chosen."""
    found = made(("a", 1, 0.97, 1), ("a", 8, 0.96, 1), ("b", 1, 0.9, 1), ("b", 8, 1.0, 1))
    assert choose(found, TPOT).winner == "b"


def test_a_candidate_that_loses_anywhere_does_not_win() -> None:
    """Better TPOT under one load does not pay for a worse TTFT under another."""
    found = made(("a", 1, 0.9, 1), ("a", 8, 0.9, 1.1), ("b", 1, 0.98, 1), ("b", 8, 0.98, 1))
    choice = choose(found, TPOT)
    assert choice.winner == "b"
    assert choice.lines[0].startswith("a: loses: TTFT +10")


def test_nothing_wins_where_nothing_differs() -> None:
    """No candidate, no YAML."""
    choice = choose(made(("a", 1, 1, 1)), TPOT)
    assert choice.winner is None
    assert choice.lines == ("a: no difference seen in TPOT",)


def test_the_yaml_carries_its_figures() -> None:
    """Machine, model, versions and the intervals are in the comments."""
    found = made(("a", 1, 0.9, 1))
    text = as_yaml(found, choose(found, TPOT), TPOT)
    assert yaml.safe_load(text) == {"version": 1, "passes": {"fast": {"label": "a"}}}
    for words in ("Model m on D.", "vllm 1.", "TPOT -10.0% (-1"):
        assert words in text


def test_the_report_stands_alone() -> None:
    """One file with sentences, figures and raw numbers; it loads nothing, and escapes names."""
    found = made(("a <b>", 1, 0.9, 1))
    page = html(found, "<svg></svg>")
    assert "src=" not in page
    assert "href=" not in page
    assert "a &lt;b&gt;" in page
    assert rows(found.cells)[0].sentence in page
    assert "3 intervals of 95%: where nothing differs, about 0.2 of them" in page
    assert "&#34;TPOT&#34;" in page  # the raw rounds


def test_every_metric_has_a_panel(tmp_path: Path) -> None:
    """PNG and SVG are written, with a panel for each metric."""
    from ascend_opt.proof import plot

    svg = plot.save(made(("a", 1, 0.9, 1), ("b", 1, 1, 1)), tmp_path)
    assert svg.startswith("<svg")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(plot.draw(made(("a", 1, 0.9, 1))).axes) == len(METRICS)
