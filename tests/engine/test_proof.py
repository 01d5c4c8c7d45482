"""verify, bisect and tune on the real vLLM; everything else of them is tested on a light one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine.third_party import fingerprint_of, install

ATTENTION = "vllm.model_executor.models.qwen3:Qwen3Attention.forward"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model"

PACKAGE = """
    from ascend_opt import Pass, hookimpl, host_patch

    class WrongLayer(Pass):
        '''Wrong in one layer only.'''
        name = "wrong-layer"
        origin = remove_when = "test"

        @host_patch("{attention}", known={{"{attention_hash}": "here"}})
        def forward(self, wrapped, attention, args, kwargs):
            self.counters["steps"] += 1
            return wrapped(*args, **kwargs) * (5 if ".1." in attention.qkv_proj.prefix else 1)

        @host_patch("{runner}", known={{"{runner_hash}": "here"}})
        def execute_model(self, wrapped, runner, args, kwargs):
            return wrapped(*args, **kwargs)

    @hookimpl
    def ascend_opt_passes():
        return [WrongLayer]
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third party's distribution, and two prompts."""
    path = tmp_path_factory.mktemp("proof")
    text = PACKAGE.format(
        attention=ATTENTION,
        attention_hash=fingerprint_of(ATTENTION),
        runner=RUNNER,
        runner_hash=fingerprint_of(RUNNER),
    )
    install(path, "wrong", text)
    (path / "prompts.txt").write_text("Hello, world\nThe quick brown fox jumps over\n")
    return path


def invoke(directory: Path, command: str, *enables: str) -> tuple[int, dict[str, Any], str]:
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ascend_opt", command, "--json", "--model", "tiny"),
            *("--prompts", str(directory / "prompts.txt"), "--max-tokens", "8"),
            *(f"--enable={name}" for name in enables),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_verify_passes_a_right_pass(directory: Path) -> None:
    """Tokens and logprobs of three real engines are equal, and every prefetch was counted."""
    code, found, errors = invoke(directory, "verify", "mlp-prefetch:backend=record")
    assert code == 0, errors
    assert found["noise"]["equal"]
    assert found["patched"]["tokens_equal"] == found["patched"]["tokens"] == 16
    assert found["patched"]["max_logprob_difference"] == 0
    (activity,) = found["activity"]
    assert activity["states"] == {"active": 1}
    assert activity["counters"]["prefetches"] == 2 * 4 * activity["counters"]["held"]


def test_verify_fails_a_pass_whose_condition_never_held(directory: Path) -> None:
    """Active, equal, and yet nothing was on: no batch has fewer than one token."""
    code, found, _ = invoke(directory, "verify", "mlp-prefetch:backend=record,max_num_tokens=1")
    assert code == 1
    assert found["verdict"] == "nothing on"
    assert "its condition never held" in found["reason"]


def test_bisect_finds_the_wrong_target(directory: Path) -> None:
    """Of two passes the wrong one, and of its two targets the one that changes a layer."""
    code, found, errors = invoke(
        directory, "bisect", "wrong-layer", "mlp-prefetch:backend=record,gate_up_bytes=0"
    )
    assert code == 1, errors
    assert found["passes"] == ["wrong-layer"]
    assert found["targets"] == [["wrong-layer", ATTENTION]]


@pytest.mark.extended
def test_tune_measures_and_traces_a_real_engine(tmp_path: Path) -> None:
    """Every load has figures, a winner is written or said not to be, and both arms have a trace.

    Each traced step of the patched engine holds its prefetches, each of the unpatched one none.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ascend_opt", "tune", "--json", "--model", "tiny"),
            *("--enable", "mlp-prefetch:backend=record", "--sweep", "mlp-prefetch.down_bytes=8KiB"),
            *("--num-requests", "2", "--input-len", "8", "--output-len", "12", "--rounds", "7"),
            *("--output", str(tmp_path / "out"), "--trace", str(tmp_path)),
        ],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # half as many imports
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    choice = json.loads(done.stdout)
    assert (choice["winner"] is None) == (choice["yaml"] is None)
    (line,) = choice["lines"]
    assert line.startswith("down_bytes=8KiB: ")

    found = json.loads((tmp_path / "out" / "result.json").read_text())
    (cell,) = found["cells"]
    assert set(cell["compared"]) == {"TPOT", "TTFT", "throughput"}
    assert len(cell["off"]["TPOT"]) == len(cell["on"]["TPOT"]) == 7
    (activity,) = found["activity"]["down_bytes=8KiB"]
    assert activity["counters"]["prefetches"] == 2 * 4 * activity["counters"]["held"]

    assert not found["notes"]
    assert list(found["traces"]) == ["down_bytes=8KiB", "unpatched"]
    on, off = (
        [e for e in json.loads(Path(path).read_text())["traceEvents"] if e.get("ph") == "X"]
        for path in found["traces"].values()
    )
    assert [e["name"] for e in off if e["name"].startswith("ascend_opt: ")] == [
        f"ascend_opt: step {number}" for number in range(1, 6)
    ]
    assert not [e for e in off if e["name"] == "ascend_opt::prefetch"]
    for number in range(1, 6):
        (step,) = [e for e in on if e["name"].startswith(f"ascend_opt: step {number}")]
        assert step["name"].endswith(": mlp-prefetch prefetches +8")
        inside = [e for e in on if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
        assert sum(e["name"] == "ascend_opt::prefetch" for e in inside) == 8
