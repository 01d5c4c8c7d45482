"""Where a proof keeps what it found, and how it says how far it is."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascend_opt.errors import AscendOptError

_HEARTBEAT_S = 30.0  # between lines that say that something still goes on, in a pipe


class WorkspaceError(AscendOptError, OSError):
    """The results cannot be written where the user wants them."""


class Workspace:
    """A directory for logs, answers and results.

    Args:
        output: Where the user wants them kept; None keeps them, in a temporary directory, only
            where something went wrong.
        command: The command's name.

    Raises:
        WorkspaceError: The directory cannot be made.
    """

    def __init__(self, output: str | None, command: str) -> None:
        self._wanted = output is not None
        try:
            if output is not None:
                Path(output).mkdir(parents=True, exist_ok=True)
            made = output or tempfile.mkdtemp(prefix=f"ascend_opt-{command}-")
        except OSError as error:
            raise WorkspaceError(f"{output}: cannot be made: {error.strerror}") from None
        self.path = Path(made).resolve()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"ascend_opt-{command}-"))

    def scratch(self, name: str) -> Path:
        """Return a path for what need not be kept."""
        return self._scratch / name

    def write(self, name: str, content: Any) -> Path:
        """Write a text, or anything else as JSON; return its path."""
        path = self.path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        return path

    def close(self, keep: bool) -> None:
        """Remove what is not to be kept.

        Args:
            keep: Keep the results, also where the user did not ask for them.
        """
        shutil.rmtree(self._scratch, ignore_errors=True)
        if not (self._wanted or keep):
            shutil.rmtree(self.path, ignore_errors=True)


class Progress:
    """Says on standard error how far a proof is: one live line on a terminal, else plain lines.

    Args:
        command: The command's name, which begins each line.
        live: Whether to draw a live line; left out: whether standard error is a terminal.
    """

    def __init__(self, command: str, live: bool | None = None) -> None:
        self._command = command
        self._live = sys.stderr.isatty() if live is None else live
        self._bar: Any = None
        self._task: Any = None
        self._text = ""
        self._begun = self._said = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(f"{self._command}: {line}", markup=False, highlight=False)
        else:
            print(f"{self._command}: {line}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Show what goes on in the body of a `with`, and how long it took."""
        self._text = text
        self._begun = self._said = time.monotonic()
        if not self._live:
            self.say(f"{text} …")
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
        )
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            self._bar, self._task = bar, bar.add_task(f"{self._command}: {text}", total=None)
            try:
                yield
            finally:
                self._bar = self._task = None

    def update(self, done: int, total: int) -> None:
        """Show how much of the stage is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def waiting(self) -> None:
        """Say now and then, where no live line does, that the stage still goes on."""
        now = time.monotonic()
        if self._bar is None and now - self._said > _HEARTBEAT_S:
            self._said = now
            self.say(f"{self._text}: {now - self._begun:.0f} s so far")
