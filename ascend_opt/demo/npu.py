"""The demo on the real vllm-ascend, over the simulated driver: every decode step is counted."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_opt.demo import STATE_HEADINGS, Table, compared, states
from ascend_opt.proof.engine_run import Job, Outcome, run
from ascend_opt.tiny import write_tiny_model

LAYERS = 4
MAX_TOKENS = 24
PROMPTS = ("Hello, world", "The quick brown fox", "one two three", "a longer prompt " * 5)
PASSES: dict[str, Any] = {"sync-elision": {}, "mlp-prefetch": {}}

_ENGINE = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    # The profile run of the default size takes minutes over interpreted kernels.
    "max_num_batched_tokens": 128,
    "gpu_memory_utilization": 0.2,
    "num_gpu_blocks_override": 64,
    "compilation_config": {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # In one process, so that its driver calls can be counted step by step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

COUNTED = {
    "host waits for the device": "sync_event",
    "device-to-host copies": "memcpy_async_d2h",
    "waits between streams": "stream_wait_event",
    "weight prefetches": "cmo_async",
}
"""What the table counts, and the driver call that it is."""

PREFETCHED = "bytes prefetched"
FILL_MS = "ms in _update_seq_lens_cpu"


@dataclass(frozen=True)
class NpuDemonstration:
    """The same requests, unpatched and with the passes; see `Demonstration`."""

    release: str
    off: Outcome
    on: Outcome
    note: str = (
        "Of the waits between streams, one for each prefetch and one that joins the side stream; "
        "none of them stops the host.\n"
        "On an NPU: python -m ascend_opt run --config configs/decode.yaml -- vllm serve MODEL"
    )

    @property
    def equal(self) -> bool:
        """See `Demonstration.equal`."""
        return self.off.tokens == self.on.tokens

    def tables(self) -> Iterator[Table]:
        """See `Demonstration.tables`."""
        title = f"One decode step of vllm-ascend {self.release}, {len(PROMPTS)} requests (median)"
        yield title, ("what", "unpatched", "with the passes"), list(self._rows())
        yield "Passes in each process", STATE_HEADINGS, states(self.on)

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for name in (*COUNTED, PREFETCHED, FILL_MS):
            off, on = (statistics.median(o.details["decode"][name]) for o in (self.off, self.on))
            form = "{:.3f}" if name == FILL_MS else "{:,.0f}"
            yield name, form.format(off), form.format(on)
        yield "tokens equal", "", compared(self.off.tokens, self.on.tokens)

    def as_dict(self) -> dict[str, Any]:
        """See `Demonstration.as_dict`."""
        return {
            "release": self.release,
            "equal": self.equal,
            "off": vars(self.off),
            "on": vars(self.on),
        }


def demonstrate(say: Callable[[str], None]) -> NpuDemonstration:
    """Run both engines.

    Args:
        say: Called with a line of progress before each step.

    Raises:
        EngineRunError: An engine did not run.
    """
    from ascend_opt.simnpu import launch
    from ascend_opt.simnpu.installation import prepare

    say("building the simulated driver (once) …")
    installation = prepare()
    with tempfile.TemporaryDirectory(prefix="ascend_opt-demo-") as name:
        model = str(write_tiny_model(Path(name) / "tiny-qwen3", layers=LAYERS))
        environment = {**launch.environment(installation, os.environ, "late"), **_ENVIRONMENT}

        def outcome(passes: dict[str, Any] | None) -> Outcome:
            job = Job(model, PROMPTS, MAX_TOKENS, _ENGINE, passes, environment)
            return run(job, serve="ascend_opt.demo.npu_steps")

        release = installation.release.name
        say(f"vllm-ascend {release}, unpatched …")
        off = outcome(None)
        say(f"vllm-ascend {release}, with {' and '.join(PASSES)} …")
        on = outcome(PASSES)
    return NpuDemonstration(release, off, on)
