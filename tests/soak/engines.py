"""The engines that are soaked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak.traffic import MAX_MODEL_LEN
from soak.verdict import PROMPTS, Effect

# float32, so that twins agree; chunks of 64 tokens, so that most long prompts are several; and
# fewer blocks of cache than eight requests need, so that some are preempted.
OPTIONS = f"--dtype float32 --max-model-len {MAX_MODEL_LEN} --max-num-seqs 8"
OPTIONS += " --max-num-batched-tokens 64 --disable-uvicorn-access-log"
SIMULATED = "run --deliver late -- vllm serve"


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        program: What starts its server, before the model.
        options: Of the server, beside those of every engine.
        environ: Variables it wants.
        passes: Those that the patched server is asked for, with their parameters.
        active: Those of them that can be on here, with what each then shows.
        rate: Requests a second, on average, that two servers on two cores keep up with.
        outstanding: Pairs of requests at the servers at most; more wait at the client.
    """

    program: tuple[str, ...]
    options: str
    environ: Mapping[str, str]
    passes: Mapping[str, Mapping[str, Any]]
    active: Mapping[str, Effect]
    rate: float
    outstanding: int

    def command(self, model: Path) -> list[str]:
        """Return the command of its server."""
        options = f"{OPTIONS} {self.options}".split()
        return [*self.program, str(model), *options]


ENGINES = {
    # Compiled, as it comes. This machine has no NPU: `record` counts what would be prefetched, and
    # the other two have nothing to patch, which they have to say.
    "cpu": Engine(
        program=(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"),
        options="--block-size 32 --num-gpu-blocks-override 33",
        environ={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        passes={"mlp-prefetch": {"backend": "record"}, "sync-elision": {}, "uva-staging": {}},
        active={"mlp-prefetch": Effect("prefetches_total")},
        rate=4,
        outstanding=24,
    ),
    # Late delivery is simnpu's default. Decode steps replay graphs, the others run eagerly, and
    # `both` prefetches in either.
    "npu-b": Engine(
        program=(sys.executable, "-m", "ascend_opt.simnpu", *SIMULATED.split()),
        options="--gpu-memory-utilization 0.2 --num-gpu-blocks-override 10 --compilation-config "
        '{"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8]}',
        environ={"VLLM_USE_V2_MODEL_RUNNER": "1"},
        passes={"mlp-prefetch": {"where": "both"}, "sync-elision": {}, "uva-staging": {}},
        active={
            # Replayed prefetches are the graph's, and counted where it was captured.
            "mlp-prefetch": Effect("prefetches_total", whenever=PROMPTS),
            "sync-elision": Effect("waits_elided_total"),
            "uva-staging": Effect("copies_total"),
        },
        rate=0.2,
        outstanding=12,
    ),
}
