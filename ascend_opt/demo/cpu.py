"""The demo on vLLM's CPU build, eager and compiled."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_opt.demo import STATE_HEADINGS, Table, compared, states
from ascend_opt.proof.engine_run import Job, Outcome, run
from ascend_opt.tiny import write_tiny_model

LAYERS = 4
MAX_TOKENS = 32
PROMPTS = ("Hello, world", "The quick brown fox", "one two three", "a much longer prompt " * 8)

PASSES = {"sync-elision": {}, "mlp-prefetch": {"backend": "record"}}
"""`record` counts what an NPU would prefetch: this machine has none."""

_ENGINE = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512}
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
MODES = {"eager": True, "compiled": False}


@dataclass(frozen=True)
class Result:
    """One mode, unpatched and with the passes."""

    mode: str
    off: Outcome
    on: Outcome

    @property
    def equal(self) -> bool:
        """Whether every token is the same."""
        return self.off.tokens == self.on.tokens


@dataclass(frozen=True)
class CpuDemonstration:
    """Both modes; see `Demonstration`."""

    results: list[Result]
    note: str = (
        "This machine has no NPU: sync-elision has nothing to patch, and mlp-prefetch counts "
        "what it would prefetch.\n"
        "On one: python -m ascend_opt run --config configs/decode.yaml -- vllm serve MODEL"
    )

    @property
    def equal(self) -> bool:
        """See `Demonstration.equal`."""
        return all(result.equal for result in self.results)

    def tables(self) -> Iterator[Table]:
        """See `Demonstration.tables`."""
        headings = ("mode", "tokens equal")
        verdicts = ((r.mode, compared(r.off.tokens, r.on.tokens)) for r in self.results)
        yield "Tokens, unpatched against patched", headings, verdicts
        rows = [row for r in self.results for row in states(r.on, r.mode)]
        yield "Passes in each process", ("mode", *STATE_HEADINGS), rows

    def as_dict(self) -> dict[str, Any]:
        """See `Demonstration.as_dict`."""
        return {
            result.mode: {"equal": result.equal, "off": vars(result.off), "on": vars(result.on)}
            for result in self.results
        }


def demonstrate(say: Callable[[str], None]) -> CpuDemonstration:
    """Run both modes.

    Args:
        say: Called with a line of progress before each engine.

    Raises:
        EngineRunError: An engine did not run.
    """
    results = []
    with tempfile.TemporaryDirectory(prefix="ascend_opt-demo-") as name:
        model = str(write_tiny_model(Path(name) / "tiny-qwen3", layers=LAYERS))
        environment = {**_ENVIRONMENT, "VLLM_CACHE_ROOT": str(Path(name) / "cache")}
        for mode, eager in MODES.items():
            engine = {**_ENGINE, "enforce_eager": eager}
            outcomes = []
            for passes in (None, PASSES):
                say(f"{mode}, {'unpatched' if passes is None else 'with ' + ', '.join(passes)} …")
                job = Job(model, PROMPTS, MAX_TOKENS, engine, passes, environment)
                outcomes.append(run(job))
            results.append(Result(mode, *outcomes))
    return CpuDemonstration(results)
