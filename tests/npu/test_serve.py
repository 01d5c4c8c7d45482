"""``vllm serve`` on the simulated device, with an HTTP client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascend_opt.simnpu.installation import Installation

START_SECONDS = 400


@pytest.fixture(scope="module")
def server(
    installation: Installation, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server started as a user would start it; stopped with its children."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    options = "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8"
    options += " --max-num-batched-tokens 128 --gpu-memory-utilization 0.2"
    options += f" --num-gpu-blocks-override 64 --host 127.0.0.1 --port {port}"
    command = [sys.executable, "-m", "ascend_opt.simnpu", "run", "--", "vllm", "serve"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_ASCEND_OPT": "off"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, str(tiny_model), *options.split()],
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _await_health(address, process, log)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _await_health(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    tail = "\n".join(log.read_text().splitlines()[-30:])
    pytest.fail(f"the server is not up after {START_SECONDS} s or has ended:\n{tail}")


def _complete(address: str, tokens: list[int]) -> list[int]:
    body = {"prompt": tokens, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({**body, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    result: list[int] = choice["token_ids"]
    return result


def test_served_completions_equal_stock_vllm(server: str, expected: dict[str, list[int]]) -> None:
    """Over HTTP, the first 16 tokens of two prompts are those of stock CPU vLLM."""
    from npu import engine_program

    for index in (1, 3):
        prompt = engine_program.prompt(index)["prompt_token_ids"]
        assert _complete(server, prompt) == expected[str(index)][:16]
