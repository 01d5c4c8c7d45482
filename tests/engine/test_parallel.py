"""Two workers: tensor parallel in one engine, and two engines side by side."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from engine.serving import complete, serving

from ascend_opt.config import ENVIRONMENT
from ascend_opt.proof.engine_run import Job, Outcome, run
from ascend_opt.reporting import ENVIRONMENT as RUN_DIRECTORY
from ascend_opt.reporting import Record, read_records
from ascend_opt.tiny import write_tiny_model

PASSES = {"mlp-prefetch": {"backend": "record"}}
PROMPTS = ("Hello, world", "The quick brown fox")
LAYERS = 4
MAX_TOKENS = 8
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
    environ = {**SETTINGS, ENVIRONMENT: json.dumps({"passes": PASSES})}
    options = ("--data-parallel-size", "2")
    with serving(model, tmp_path / "log", environ, *options) as address:
        texts = {complete(address, PROMPTS[0], MAX_TOKENS) for _ in range(6)}
        time.sleep(2)  # records are written every second
        workers = [record for record in read_records() if record.process.rank is not None]

    assert len(texts) == 1
    assert sorted((r.process.replica, r.process.rank) for r in workers) == [(0, 0), (1, 0)]
    assert all(steps(record) > 0 for record in workers), workers


def steps(record: Record) -> int:
    (status,) = record.passes
    assert status.state == "active"
    return status.counters.get("prefetches", 0)
