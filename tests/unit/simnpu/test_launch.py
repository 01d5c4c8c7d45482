import os
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ascend_opt.simnpu import cli, counters, launch
from ascend_opt.simnpu.installation import Installation
from ascend_opt.simnpu.releases import RELEASES, ReleaseError


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(
        RELEASES[0], tmp_path / "driver", tmp_path / "d.so", tmp_path / "s", tmp_path / "m"
    )


def test_user_s_paths_stay_behind_ours(installation: Installation) -> None:
    """Library and module paths are extended, not replaced."""
    base = {"LD_LIBRARY_PATH": "/mine", "PYTHONPATH": "/py"}
    environ = launch.environment(installation, base)
    assert environ["LD_LIBRARY_PATH"].split(os.pathsep) == [str(installation.driver), "/mine"]
    assert environ["PYTHONPATH"].split(os.pathsep)[0] == str(launch.SITE)
    assert environ["PYTHONPATH"].split(os.pathsep)[-1] == "/py"


def test_torch_finds_the_device_whatever_the_shell_says(installation: Installation) -> None:
    """A shell that keeps torch from loading torch_npu, for use without the driver, is overruled."""
    found = launch.environment(installation, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert found["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


def test_user_s_choice_of_task_queue_is_kept(installation: Installation) -> None:
    """Defaults give way to what the environment sets."""
    assert launch.environment(installation, {})["TASK_QUEUE_ENABLE"] == "0"
    chosen = launch.environment(installation, {"TASK_QUEUE_ENABLE": "1"})
    assert chosen["TASK_QUEUE_ENABLE"] == "1"


def test_delivery_and_trace_reach_the_driver(installation: Installation, tmp_path: Path) -> None:
    """The options are variables that the driver reads, in child processes too."""
    environ = launch.environment(installation, {}, "now", tmp_path)
    assert (environ["SIMNPU_DELIVER"], environ["SIMNPU_TRACE"]) == ("now", str(tmp_path))
    assert "SIMNPU_TRACE" not in launch.environment(installation, {})


def test_without_compute_the_device_is_as_large_as_a_card(installation: Installation) -> None:
    """The driver is told, and a choice of memory by the user is kept."""
    full = launch.environment(installation, {})
    none = launch.environment(installation, {}, compute="none")
    assert (full["SIMNPU_COMPUTE"], none["SIMNPU_COMPUTE"]) == ("full", "none")
    assert "SIMNPU_MEM_GB" not in full
    assert none["SIMNPU_MEM_GB"] == "64"
    chosen = launch.environment(installation, {"SIMNPU_MEM_GB": "9"}, compute="none")
    assert chosen["SIMNPU_MEM_GB"] == "9"


def test_run_gives_back_the_program_s_exit_code(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`simnpu run -- CMD` is CMD to whoever waits for it; options after -- are CMD's own."""
    monkeypatch.setattr(cli, "prepare", lambda asked: installation)
    monkeypatch.setattr(launch, "SITE", Path("/nowhere"))
    program = "import os, sys; sys.exit(int(os.environ['SIMNPU']) + len(sys.argv))"
    done = CliRunner().invoke(cli.simnpu, ["run", "--", "python", "-c", program, "--trace"])
    assert done.exit_code == 3


def test_without_compute_run_says_that_no_token_is_true(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who computes nothing is told so, on stderr; the program is told by its environment."""
    monkeypatch.setattr(cli, "prepare", lambda asked: installation)
    program = "import os, sys; sys.exit(os.environ['SIMNPU_COMPUTE'] != 'none')"
    command = ["run", "--compute", "none", "--", "python", "-S", "-c", program]
    done = CliRunner().invoke(cli.simnpu, command)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no token of this run is a true one" in done.stderr


def test_termination_is_passed_on_and_reported_as_a_shell_would() -> None:
    """Ending the launcher ends the program: no engine is left behind."""
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(30)"
    code = launch.run([sys.executable, "-S", "-c", program], dict(os.environ))
    assert code == 128 + signal.SIGTERM


def test_unsupported_set_is_reported_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the environment is one line on stderr, and exit code 1."""

    def refuse(asked: str | None) -> None:
        raise ReleaseError("torch is 1.0, expected 2.13.0")

    monkeypatch.setattr(cli, "prepare", refuse)
    done = CliRunner().invoke(cli.simnpu, ["run", "--", "python"])
    assert (done.exit_code, done.output) == (1, "simnpu: torch is 1.0, expected 2.13.0\n")


def test_unknown_program_is_a_usage_error(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is nowhere is named."""
    monkeypatch.setattr(cli, "prepare", lambda asked: installation)
    done = CliRunner().invoke(cli.simnpu, ["run", "--", "no-such-program"])
    assert done.exit_code == 2
    assert "no-such-program: no such program on PATH or beside" in done.output


def test_counters_outside_simnpu_say_how_to_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver there are no counters, and the error gives the command."""
    monkeypatch.setattr(sys.modules["ctypes"], "CDLL", _absent)
    counters._driver.cache_clear()
    with pytest.raises(counters.NotSimulatedError, match=r"python -m ascend_opt\.simnpu run"):
        counters.snapshot()
    counters._driver.cache_clear()


def _absent(name: str) -> None:
    raise OSError(name)


def test_counters_subtract_by_kind() -> None:
    """A difference of snapshots is the work in between; an unknown kind lists the known ones."""
    a = counters.Counters(*({"x": n} for n in (1, 2, 3, 4, 5)))
    b = counters.Counters(*({"x": n} for n in (11, 22, 33, 44, 55)))
    d = b - a
    assert (d["x"], d.bytes["x"], d.replayed["x"]) == (10, 20, 30)
    assert (d.replayed_bytes["x"], d.executed["x"]) == (40, 50)
    with pytest.raises(KeyError, match="'y' is no kind of driver call; there are x"):
        d["y"]
