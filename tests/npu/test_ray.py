"""The executor that starts its workers with Ray: nothing but the environment reaches them."""

import json
from pathlib import Path

import pytest
from npu.conftest import HERE, Simulate, read_result

from ascend_opt.config import ENVIRONMENT
from ascend_opt.reporting import ENVIRONMENT as RUN_DIRECTORY

PASSES = {"sync-elision": {}, "mlp-prefetch": {"where": "both"}}


@pytest.mark.extended
def test_a_worker_of_ray_has_the_passes(
    simulate: Simulate, tiny_model: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Both passes are active and at work in Ray's worker, its record is found, tokens are equal."""
    pytest.importorskip("ray", reason="Ray is installed in one of the two environments only")
    done = simulate(
        HERE / "ray_program.py",
        str(tiny_model),
        environ={
            ENVIRONMENT: json.dumps({"passes": PASSES}),
            RUN_DIRECTORY: str(tmp_path / "run"),
            "PYTHONPATH": str(HERE.parent),
            "VLLM_USE_V2_MODEL_RUNNER": "1",
        },
    )
    found = read_result(done)

    assert found["tokens"] == expected
    (worker,) = (record for record in found["records"] if record["rank"] is not None)
    assert worker["role"] == "RayWorker"
    statuses = {status["name"]: status for status in worker["passes"]}
    assert {status["state"] for status in statuses.values()} == {"active"}
    assert statuses["sync-elision"]["counters"]["held"] > 0
    assert statuses["mlp-prefetch"]["counters"]["prefetches"] > 0
