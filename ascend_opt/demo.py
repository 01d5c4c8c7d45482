"""`ascend_opt demo`: a real vLLM on this CPU, unpatched and then with the passes, in one table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """One mode, unpatched and patched.

    Attributes:
        mode: `eager` or `compiled`.
        off: The unpatched run.
        on: The run with the passes.
    """

    mode: str
    off: Outcome
    on: Outcome

    @property
    def equal(self) -> bool:
        """Whether every token is the same."""
        return self.off.tokens == self.on.tokens

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield one row for each process and pass."""
        tokens = sum(map(len, self.on.tokens))
        verdict = f"{tokens} of {tokens} equal" if self.equal else "DIFFERENT"
        for record in self.on.records:
            for status in record["passes"]:
                yield (
                    self.mode,
                    f"{record['role']} ({record['pid']})",
                    status["name"],
                    status["state"],
                    " ".join(f"{k}={v}" for k, v in status["counters"].items()) or "-",
                    verdict,
                    status["reason"],
                )


def demonstrate(say: Callable[[str], None]) -> list[Result]:
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
    return results
