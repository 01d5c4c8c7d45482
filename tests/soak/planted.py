"""Two passes that a soak has to find: one changes a token, one keeps some memory at every step.

The soak installs this module as a third party's package would be, beside the passes of the run.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_opt import Pass, hookimpl, host_patch
from ascend_opt.targets import Target, locate

UPDATE = "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"
FAULTS = ("wrong-token", "leak")


def _known() -> dict[str, str]:
    source = locate(Target.parse(UPDATE))
    return {} if source is None else {source.fingerprint: "here"}


class WrongToken(Pass):
    """Change one token, once."""

    name = "wrong-token"
    origin = remove_when = "the soak"

    @host_patch(UPDATE, known=_known(), redo=False)
    def update(self, wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
        """Take another character for the first request's token, after 300 steps."""
        output = kwargs.get("model_runner_output", args[-1] if args else None)
        self.counters["steps"] += 1
        if self.counters["steps"] >= 300 and not self.counters["changed"]:
            tokens = next((t for t in output.sampled_token_ids if len(t)), None)
            if tokens is not None:
                tokens[-1] = 33 + int(tokens[-1]) % 90
                self.counters["changed"] += 1
        return wrapped(*args, **kwargs)


@dataclass(frozen=True)
class LeakParameters:
    """Parameters of leak.

    Attributes:
        size: Bytes that are kept at every step.
    """

    size: int = 16384


class Leak(Pass):
    """Keep some bytes at every step."""

    name = "leak"
    origin = remove_when = "the soak"
    Parameters = LeakParameters

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._kept: list[bytes] = []

    @host_patch(UPDATE, known=_known(), redo=False)
    def update(self, wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
        """Keep bytes of our own."""
        self.counters["steps"] += 1
        self._kept.append(b"x" * self.parameters.size)
        return wrapped(*args, **kwargs)


@hookimpl
def ascend_opt_passes() -> list[type[Pass]]:
    """Register both."""
    return [WrongToken, Leak]


def install(directory: Path) -> None:
    """Write this module with an entry point into a directory for PYTHONPATH."""
    directory.mkdir()
    shutil.copy(__file__, directory / "soak_planted.py")
    metadata = directory / "soak_planted-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: soak_planted\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ascend_opt.passes]\nsoak_planted = soak_planted\n")
