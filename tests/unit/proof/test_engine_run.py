import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ascend_opt.proof.engine_run import (
    EngineInputError,
    EngineProcess,
    EngineRunError,
    Job,
    run,
)
from ascend_opt.reporting import started_at

# Speaks the engine's protocol without an engine. Its first prompt is what it is to do.
CHILD = """
import json, os, signal, subprocess, sys, time
answers = open(sys.argv[2], "a")
def say(kind, **content):
    print(json.dumps({"kind": kind, **content}), file=answers, flush=True)
say("started", start_s=1.5, versions={})
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "records":
        say("records", records=[])
        continue
    what = command["prompts"][0]
    if what == "crash":
        print("the last words", flush=True)
        os.kill(os.getpid(), 9)
    if what == "input":
        say("input", message="no such flag")
        sys.exit(2)
    if what == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the child inherits
        child = subprocess.Popen(["sleep", "1000"])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(f"child {child.pid}", flush=True)
        time.sleep(1000)
    for index, prompt in reversed(list(enumerate(command["prompts"]))):
        say("finished", request=index, tokens=[len(prompt)], logprobs=[], prompt_tokens=1,
            first_s=0.1, last_s=0.2)
    say("generated", wall_s=0.25)
"""


def ends(pid: int) -> bool:
    """Wait until a process that was killed is gone."""
    until = time.monotonic() + 30
    while started_at(pid) is not None and time.monotonic() < until:
        time.sleep(0.02)
    return started_at(pid) is None


@pytest.fixture
def python(tmp_path: Path) -> list[str]:
    """A command that runs the child above, whatever module it is asked for."""
    (tmp_path / "child.py").write_text(CHILD)
    starter = tmp_path / "start.py"
    starter.write_text(
        "import runpy, sys\n"
        f"sys.argv = ['child', *sys.argv[3:]]\nrunpy.run_path({str(tmp_path / 'child.py')!r})\n"
    )
    return [sys.executable, str(starter)]


def test_answers_come_in_the_order_of_the_prompts(python: list[str]) -> None:
    """Requests may finish in any order; the outcome follows the prompts."""
    seen = []
    found = run(
        Job("m", ["a", "bcd"]),
        python=python,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.tokens == [[1], [3]]
    assert (found.start_s, found.generate_s) == (1.5, 0.25)
    assert seen == [(1, 2), (2, 2)]


def test_an_engine_that_dies_is_an_error_with_its_log(python: list[str]) -> None:
    """The message says how it ended and shows its last words."""
    with pytest.raises(EngineRunError, match=r"signal 9(.|\n)*the last words"):
        run(Job("m", ["crash"]), python=python)


def test_what_vllm_does_not_take_is_an_input_error(python: list[str]) -> None:
    """A wrong argument is told apart from an engine that dies."""
    with pytest.raises(EngineInputError, match="no such flag"):
        run(Job("m", ["input"]), python=python)


def test_a_command_that_is_not_there_is_named() -> None:
    """A launcher that cannot be started is named, and nothing is left behind."""
    with pytest.raises(EngineRunError, match="no-such-python"):
        run(Job("m"), python=["no-such-python"])


def test_time_is_limited_and_descendants_are_ended(python: list[str], tmp_path: Path) -> None:
    """An engine that takes too long is ended with everything that it started."""
    with pytest.raises(EngineRunError, match="more than 1 s"):
        run(Job("m", ["hang"]), python=python, timeout_s=1, directory=tmp_path, name="slow")
    assert ends(int((tmp_path / "slow.log").read_text().split()[1]))


def test_an_interrupt_ends_the_engine(python: list[str], tmp_path: Path) -> None:
    """Ctrl-C while an engine works ends it and its children at once."""
    log = tmp_path / "engine.log"

    def interrupt() -> None:
        while not (log.exists() and "child" in log.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), 2)

    # A shell's background jobs ignore it.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(Job("m", ["hang"]), python=python, directory=tmp_path)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, ignored)
    assert ends(int(log.read_text().split()[1]))


def test_the_engine_ends_when_its_user_dies(tmp_path: Path) -> None:
    """An engine whose parent was killed notices, though it is in a session of its own."""
    script = (
        "import sys, time; from ascend_opt.proof import engine_child\n"
        "commands = engine_child.Commands(); print('up', flush=True); time.sleep(1000)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    child.stdin.close()
    assert child.wait(30) == -9
    child.stdout.close()


def test_what_was_finished_is_kept(python: list[str], tmp_path: Path) -> None:
    """Answers are in a file as they come, so an engine's death does not take them along."""
    with EngineProcess(Job("m"), python=python, directory=tmp_path, name="e") as engine:
        engine.started()
        engine.generate(["ab"], 1)
        with pytest.raises(EngineRunError):
            engine.generate(["crash"], 1)
    assert '"tokens": [2]' in (tmp_path / "e.jsonl").read_text()


def test_the_environment_of_a_run(tmp_path: Path) -> None:
    """An unpatched run is told `off`, so a configuration of the caller's does not reach it."""
    code = "import os; print(os.environ['VLLM_ASCEND_OPT']); raise SystemExit(3)"
    with pytest.raises(EngineRunError, match=r"exit code 3\noff$"):
        run(Job("m"), python=[sys.executable, "-c", code], directory=tmp_path)
