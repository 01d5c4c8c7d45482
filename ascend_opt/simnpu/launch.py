"""The environment of a program under simnpu, and starting one."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ascend_opt.simnpu.installation import Installation

Delivery = Literal["late", "now"]
Compute = Literal["full", "none"]

SITE = Path(__file__).parent / "site"
DISPATCH_VARIABLE = "SIMNPU_DISPATCH"
SCHEMAS_VARIABLE = "SIMNPU_SCHEMAS"


def environment(
    installation: "Installation",
    base: Mapping[str, str],
    deliver: Delivery = "late",
    trace: Path | None = None,
    compute: Compute = "full",
) -> dict[str, str]:
    """Return the environment in which a Python program finds the simulated device.

    Child processes inherit it, so vLLM's engine and worker processes are simulated too.

    Args:
        installation: What :func:`~ascend_opt.simnpu.installation.prepare` returned.
        base: The environment to extend; what it sets of the tunable part is kept.
        deliver: When queued work takes effect: as late as it may, or at once.
        trace: Directory that every process writes its own trace file into, or None.
        compute: Whether kernels compute, or return at once with the right shapes.
    """
    cache = installation.metadata.parent
    fixed = {
        "SIMNPU": "1",
        "SIMNPU_DELIVER": deliver,
        "SIMNPU_COMPUTE": compute,
        DISPATCH_VARIABLE: str(installation.dispatch),
        SCHEMAS_VARIABLE: str(installation.schemas),
        "LD_LIBRARY_PATH": _joined(base.get("LD_LIBRARY_PATH"), installation.driver),
        "PYTHONPATH": _joined(base.get("PYTHONPATH"), SITE, installation.metadata, _package_root()),
        "ASCEND_HOME_PATH": str(installation.driver),
        "ASCEND_OPP_PATH": str(installation.driver),
        "SOC_VERSION": "ascend910b1",
        # Off in a shell from which torch is also imported without the simulated driver.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        # Triton kernels run in its interpreter: there is no Triton compiler for Ascend here.
        "TRITON_INTERPRET": "1",
        # What vllm-ascend takes for vLLM's version when it picks its patches.
        "VLLM_VERSION": installation.release.vllm,
    }
    if trace is not None:
        fixed["SIMNPU_TRACE"] = str(trace)
    tunable = {
        # Off: copies and events reach the driver at the call, which makes traces easy to read.
        "TASK_QUEUE_ENABLE": "0",
        # Tiny models gain nothing from threads, and threads that spin for one another on a busy
        # machine made runs up to eight times as long.
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CACHE_ROOT": str(cache / f"vllm-{installation.release.name}"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / f"inductor-{installation.release.name}"),
        # Compiled artifacts of an earlier run may hold kernels of another build of this driver.
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }
    if compute == "none":
        tunable["SIMNPU_MEM_GB"] = "64"  # as a card has; none of it is touched
    return {**tunable, **base, **fixed}


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command in an environment of :func:`environment` and return its exit code.

    A termination signal is passed on. An interrupt from a terminal reaches the command by itself,
    and how to end is its own decision.

    Returns:
        The exit code as a shell gives it: 128 + n for a command that signal n ended.
    """
    with subprocess.Popen(command, env=dict(environ)) as process:

        def pass_on(number: int, frame: object) -> None:
            process.send_signal(number)

        before = [
            signal.signal(signal.SIGTERM, pass_on),
            signal.signal(signal.SIGINT, signal.SIG_IGN),
        ]
        try:
            code = process.wait()
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _joined(old: str | None, *new: Path) -> str:
    return os.pathsep.join([*map(str, new), *([old] if old else [])])


def _package_root() -> Path:
    return Path(__file__).parent.parent.parent
