"""A server of vLLM, started as a user would, and an HTTP client."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        address: Its URL.
        pid: The process that was started; the server is that or a descendant.
    """

    address: str
    pid: int


@contextmanager
def running(
    command: Sequence[str], log: Path, environ: Mapping[str, str], start_seconds: float
) -> Iterator[str]:
    """Give the address of the server that answers; it ends with all that it started."""
    with started(command, log, environ, start_seconds) as server:
        yield server.address


@contextmanager
def started(
    command: Sequence[str], log: Path, environ: Mapping[str, str], start_seconds: float
) -> Iterator[Server]:
    """Give the server that answers; it ends with all that it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **environ},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _await_health(process, f"{address}/health", log, start_seconds)
        yield Server(address, process.pid)
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself, and the log says why
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _await_health(
    process: subprocess.Popen[bytes], url: str, log: Path, start_seconds: float
) -> None:
    deadline = time.monotonic() + start_seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    tail = "\n".join(log.read_text().splitlines()[-30:])
    pytest.fail(f"the server is not up after {start_seconds} s or has ended:\n{tail}")


def complete(address: str, **body: Any) -> dict[str, Any]:
    """Return the choice that the server gives for a greedy completion past the end token."""
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return choice
