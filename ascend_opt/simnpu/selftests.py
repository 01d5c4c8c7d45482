"""A correct program and three faulty ones: does the simulated device tell them apart?

Each is a few lines of ordinary torch_npu code, run in a process of its own as
``python -m ascend_opt.simnpu.selftests NAME`` under late delivery.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascend_opt.simnpu import launch

if TYPE_CHECKING:
    from ascend_opt.simnpu.installation import Installation


@dataclass(frozen=True)
class Verdict:
    """How one program of the self-test went.

    Attributes:
        program: What it does, in words.
        result: ``right values``, ``wrong values``, or how it failed.
        expected: What a test bed worth having shows.
    """

    program: str
    result: str
    expected: str

    @property
    def good(self) -> bool:
        """Whether the result is the expected one."""
        return self.result == self.expected


def run_all(installation: "Installation") -> list[Verdict]:
    """Run every program under late delivery and return the verdicts."""
    environ = launch.environment(installation, os.environ, "late")
    verdicts = []
    for name, (_, described, expected) in PROGRAMS.items():
        command = [sys.executable, "-m", "ascend_opt.simnpu.selftests", name]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        failed = (done.stderr.strip().splitlines() or ["no output"])[-1]
        result = lines[-1] if lines and done.returncode == 0 else f"failed: {failed[:120]}"
        verdicts.append(Verdict(described, result, expected))
    return verdicts


def _step(*, wait_host: bool = True, wait_stream: bool = True, keep_source: bool = True) -> bool:
    """Copy in, multiply on the main stream, add on a side stream, copy out; is it right?"""
    import torch

    source = torch.full((64,), 3.0).pin_memory()
    result = torch.full((64,), -1.0).pin_memory()
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    device = torch.zeros(64, device="npu")
    torch.npu.synchronize()

    device.copy_(source, non_blocking=True)
    if not keep_source:
        source.fill_(100.0)  # the copy has not happened yet
    product = device * 2
    if wait_stream:
        side.wait_stream(main)
    with torch.npu.stream(side):
        total = product + 1
        result.copy_(total, non_blocking=True)
        done = torch.npu.Event()
        done.record()
    if wait_host:
        done.synchronize()
    return bool((result == 7.0).all())


PROGRAMS: dict[str, tuple[Callable[[], bool], str, str]] = {
    "correct": (_step, "correct", "right values"),
    "host-wait": (
        lambda: _step(wait_host=False),
        "host reads a result without waiting for its copy",
        "wrong values",
    ),
    "stream-wait": (
        lambda: _step(wait_stream=False),
        "side stream reads a tensor without waiting for the main stream",
        "wrong values",
    ),
    "source": (
        lambda: _step(keep_source=False),
        "pinned source overwritten before its copy was delivered",
        "wrong values",
    ),
}


if __name__ == "__main__":
    print("right values" if PROGRAMS[sys.argv[1]][0]() else "wrong values")
