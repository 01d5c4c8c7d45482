"""Triton in interpreter mode, in processes of its own: the mode is set for a whole process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

REPOSITORY = Path(__file__).parents[3]
CASES = Path(__file__).with_name("triton_interpreter_cases.py")


def run_python(*args, interpret):
    """Run Python from the repository with or without Triton's interpreter mode."""
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    return subprocess.run(
        [sys.executable, *args],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_cases_hold_in_interpreter_mode():
    """Every case of triton_interpreter_cases.py passes; its report is shown where one does not."""
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES), interpret="1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_compiled_mode_is_refused():
    """Triton decides when it is imported; too late is said at once, with what to do."""
    code = (
        "import triton; from ascend_opt.simnpu.triton_interpreter import install;"
        "install(triton, None, None)"
    )
    done = run_python("-c", code, interpret="0")
    assert done.returncode != 0
    assert "set TRITON_INTERPRET=1 before it is imported" in done.stderr
