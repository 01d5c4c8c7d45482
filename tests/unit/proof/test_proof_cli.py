import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from outcomes import outcome, record

from ascend_opt.cli import main
from ascend_opt.config import ENVIRONMENT
from ascend_opt.proof import runner
from ascend_opt.proof.engine_run import EngineRunError, Job, Outcome

PASS = "mlp-prefetch"
ON = [record((PASS, "active", {"steps": 2, "held": 2, "prefetches": 8}))]
# Another Python than ours: what is installed here, vLLM or not, is then no matter.
VERIFY = ("verify", "--enable", f"{PASS}:backend=record", "--model", "tiny", "--python", "another")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Job], Outcome]], None]:
    """Puts a function in the place of engines."""

    def put(answer: Callable[[Job], Outcome]) -> None:
        monkeypatch.setattr(runner, "run", lambda job, **_: answer(job))

    return put


def right(job: Job) -> Outcome:
    return outcome([65] * job.max_tokens, records=ON if job.passes else [])


def test_verify_passes_and_leaves_nothing_behind(engine: Any, tmp_path: Path) -> None:
    """Exit 0, a sentence, and no directory that nobody asked for."""
    engine(right)
    result = invoke(*VERIFY)
    assert result.exit_code == 0
    assert "PASS: equal: 32 of 32 tokens equal" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_verify_fails_on_a_difference(engine: Any, tmp_path: Path) -> None:
    """Exit 1; JSON on standard output, JUnit in its file, logs kept and named."""
    engine(lambda job: outcome([65, 66 + bool(job.passes)], records=ON if job.passes else []))
    result = invoke(*VERIFY, "--json", "--junit", "found.xml")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["first_difference"]["position"] == 1
    assert ET.parse(tmp_path / "found.xml").getroot().get("failures") == "1"
    kept = Path(result.stderr.rpartition("Kept in ")[2].partition(":")[0])
    assert json.loads((kept / "result.json").read_text()) == found


def test_verify_hands_everything_to_the_engine(engine: Any) -> None:
    """The arguments of vLLM come after the model's own; every run has the same batches."""
    jobs: list[Job] = []
    engine(lambda job: (jobs.append(job), right(job))[1])
    Path("p.txt").write_text("a\nb\n")
    invoke(*VERIFY, "--prompts", "p.txt", "--max-tokens", "3", "--", "--max-model-len", "99")
    patched, *unpatched = jobs
    assert patched.passes == {PASS: {**patched.passes[PASS], "backend": "record"}}
    assert [job.passes for job in unpatched] == [None, None]
    for job in jobs:
        assert (job.prompts, job.max_tokens) == (["a", "b"], 3)
        assert job.arguments[-2:] == ("--max-model-len", "99")
        assert job.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nowhere"), "no model at nowhere"),
        (("--prompts", "nothing.txt"), "nothing.txt: cannot be read"),
        (("--prompts", "empty.txt"), "empty.txt: no prompts"),
        (("--enable", "mlp-prefech"), "did you mean 'mlp-prefetch'?"),
        (("--enable", f"{PASS}:backend=gpu"), "backend"),
        (("--config", "nothing.yaml"), "nothing.yaml"),
        (("--max-tokens", "0"), "max-tokens"),
        (("--junit", "no/such/dir.xml"), "cannot be written"),
        (("--output", "empty.txt"), "empty.txt"),
        (("--python", ""), "--python"),
        (("--", "--model", "other"), "give --model before --"),
    ],
)
def test_bad_input_is_an_error_before_any_engine(
    engine: Any, arguments: tuple[str, ...], words: str
) -> None:
    """Exit 2, one message that names what was wrong, no engine started."""
    engine(lambda _: pytest.fail("an engine was started"))
    Path("empty.txt").write_text("\n")
    result = invoke(*VERIFY, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_verify_needs_a_pass() -> None:
    """Without --enable and --config there is nothing to verify."""
    result = invoke("verify", "--model", "tiny")
    assert result.exit_code == 2
    assert "nothing to try" in result.stderr


def test_verify_refuses_while_vllm_plugins_filters_us_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is started in which no pass could be on."""
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    result = invoke(*VERIFY)
    assert result.exit_code == 2
    assert "VLLM_PLUGINS" in result.stderr


def test_an_engine_that_does_not_start_is_exit_2(engine: Any) -> None:
    """An engine that does not run unpatched either is an error with the tail of its log."""

    def die(_: Job) -> Outcome:
        raise EngineRunError("the engine ended with exit code 1\nout of memory")

    engine(die)
    result = invoke(*VERIFY)
    assert result.exit_code == 2
    assert "out of memory" in result.stderr


def test_an_interrupt_keeps_and_names_what_there_is(engine: Any) -> None:
    """Ctrl-C in the second run: exit 130, and the first run's outcome is kept."""

    def interrupted(job: Job) -> Outcome:
        if job.passes is None:
            raise KeyboardInterrupt
        return right(job)

    engine(interrupted)
    result = invoke(*VERIFY)
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr
    kept = Path(result.stderr.rpartition("Kept in ")[2].partition(":")[0])
    assert json.loads((kept / "patched.json").read_text())["tokens"] == [[65] * 32]


def test_the_list_of_commands_costs_no_engine() -> None:
    """The top-level help knows the proof commands; list-passes does not import them."""
    assert "verify" in invoke("--help").stdout
    code = (
        "import sys; from ascend_opt.cli import main; main(['list-passes'], standalone_mode=False);"
        "sys.exit([m for m in sys.modules if m.startswith('ascend_opt.proof')] or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert found.returncode == 0, found.stderr


def test_time_passes_visibly_in_a_pipe(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that takes long says so from time to time, with the seconds so far."""
    from ascend_opt.proof.workspace import Progress

    progress = Progress("verify", live=False)
    with progress.stage("unpatched"):
        now = time.monotonic()
        monkeypatch.setattr("time.monotonic", lambda: now + 31)
        progress.waiting()
        progress.waiting()
    assert capsys.readouterr().err.splitlines() == [
        "verify: unpatched …",
        "verify: unpatched: 31 s so far",
    ]
