"""Two workers: tensor parallel in one engine, and two engines side by side."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ascend_opt.config import ENVIRONMENT
from ascend_opt.proof.engine_run import Job, Outcome, run
from ascend_opt.reporting import ENVIRONMENT as RUN_DIRECTORY
from ascend_opt.reporting import Record, read_records
from ascend_opt.tiny import write_tiny_model

PASSES = {"mlp-prefetch": {"backend": "record"}}
PROMPTS = ("Hello, world", "The quick brown fox")
LAYERS = 4
MAX_TOKENS = 8
START_SECONDS = 300
# The CPU platform asks for a NUMA node a worker, or to be told where to put them.
SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_tiny_model(directory, layers=LAYERS))


def tensor_parallel(model: str, cache: Path, passes: dict[str, Any]) -> Outcome:
    return run(
        Job(
            model=model,
            prompts=PROMPTS,
            max_tokens=MAX_TOKENS,
            passes=passes,
            engine={
                "enforce_eager": True,
                "max_model_len": 256,
                "max_num_seqs": 4,
                "tensor_parallel_size": 2,
            },
            environment={**SETTINGS, "VLLM_CACHE_ROOT": str(cache)},
        )
    )


def test_tensor_parallel_workers_each_run_the_pass(model: str, tmp_path: Path) -> None:
    """Both ranks prefetch at every step, their own shard of the weights, and no token changes."""
    patched = tensor_parallel(model, tmp_path, PASSES)
    unpatched = tensor_parallel(model, tmp_path, {})

    assert patched.tokens == unpatched.tokens
    workers = [record for record in patched.records if record["rank"] is not None]
    assert [record["rank"] for record in workers] == [0, 1]
    for record in workers:
        (status,) = record["passes"]
        counters = status["counters"]
        assert status["state"] == "active"
        assert counters["prefetches"] == counters["steps"] * 2 * LAYERS
        assert counters["steps"] >= MAX_TOKENS


@pytest.mark.extended
def test_data_parallel_engines_each_run_the_pass(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two engines of a server has the pass; the status tells which engine is which."""
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path / "run"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = "--enforce-eager --max-model-len 256 --max-num-seqs 4 --data-parallel-size 2"
    options += f" --host 127.0.0.1 --port {port} --served-model-name tiny"
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", model, *options.split()),
            ],
            env={**os.environ, **SETTINGS, ENVIRONMENT: json.dumps({"passes": PASSES})},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        await_health(server, f"http://127.0.0.1:{port}/health", log)
        texts = {complete(f"http://127.0.0.1:{port}/v1/completions") for _ in range(6)}
        time.sleep(2)  # records are written every second
        workers = [record for record in read_records() if record.process.rank is not None]
    finally:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)

    assert len(texts) == 1
    assert sorted((r.process.replica, r.process.rank) for r in workers) == [(0, 0), (1, 0)]
    assert all(steps(record) > 0 for record in workers), workers


def steps(record: Record) -> int:
    (status,) = record.passes
    assert status.state == "active"
    return status.counters.get("prefetches", 0)


def await_health(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail("the server is not up:\n" + "\n".join(log.read_text().splitlines()[-30:]))


def complete(url: str) -> str:
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": MAX_TOKENS}
    data = json.dumps({**body, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text
