"""vLLM's server of a model, as a user starts it, and an HTTP client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

START_SECONDS = 300


@contextmanager
def serving(model: str, log: Path, environ: Mapping[str, str], *options: str) -> Iterator[str]:
    """Give the address of a server that answers; it ends with all that it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", *options]
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **environ},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        await_health(server, f"{address}/health", log)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def await_health(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail("the server is not up:\n" + "\n".join(log.read_text().splitlines()[-30:]))


def complete(address: str, prompt: str, max_tokens: int) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text
