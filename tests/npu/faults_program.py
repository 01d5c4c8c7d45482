"""Injects one fault after another into one running engine that captures graphs.

Usage: ``faults_program.py MODEL``. mlp-prefetch is on from the start, on a torch_npu without
npu_prefetch, so that the first fault meets the engine while it captures. Prints as JSON how each
fault ended; the tokens are compared with those of the engine without any pass.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ascend_opt
from ascend_opt.devices import NpuBackend

logger = logging.getLogger("vllm.ascend_opt")
KEYWORDS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "gpu_memory_utilization": 0.2,
    "num_gpu_blocks_override": 32,
    "enable_prefix_caching": False,
    "compilation_config": {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
}
LENGTHS = (5, 150, 11)
EVERYWHERE = {"where": "both"}


class Without:
    """`torch.ops.npu` of a torch_npu that has no npu_prefetch."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        if name == "npu_prefetch":
            raise AttributeError("'_OpNamespace' 'npu' object has no attribute 'npu_prefetch'")
        return getattr(self._operators, name)


@contextmanager
def without_npu_prefetch() -> Iterator[None]:
    import torch

    operators = torch.ops.npu
    vars(torch.ops)["npu"] = Without(operators)
    try:
        yield
    finally:
        vars(torch.ops)["npu"] = operators


@contextmanager
def without_side_stream() -> Iterator[None]:
    """The device has no stream left for us; the engine has its own."""
    import torch

    prepare, side, stream = NpuBackend.prepare, NpuBackend._side, torch.npu.Stream

    def refuse() -> Any:
        raise RuntimeError("no stream is left")

    def prepare_without(self: Any) -> None:
        torch.npu.Stream = refuse
        try:
            prepare(self)
        finally:
            torch.npu.Stream = stream

    NpuBackend.prepare, NpuBackend._side = prepare_without, None
    try:
        yield
    finally:
        NpuBackend.prepare, NpuBackend._side = prepare, side


class Bench:
    """The running engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.unpatched: dict[str, list[int]] = {}
        self._runs = 0

    def serve(self, steps: int) -> dict[str, list[int]]:
        from vllm import SamplingParams

        self._runs += 1
        greedy = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
        for i, length in enumerate(LENGTHS):
            prompt = [2 + (7 * i + 13 * k) % 500 for k in range(length)]
            self.engine.add_request(f"{self._runs}-{i}", {"prompt_token_ids": prompt}, greedy)
        tokens: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                name = output.request_id.rpartition("-")[2]
                tokens[name] = list(output.outputs[0].token_ids)
        return tokens

    def end(self, name: str, steps: int = 12) -> dict[str, Any]:
        """Serve, switch the pass off, serve again; return how it ended."""
        during = self.serve(steps)
        status = next(s.as_dict() for s in ascend_opt.status() if s.name == name)
        ascend_opt.disable(name)
        return {
            "equal": [self.equal(during), self.equal(self.serve(8))],
            "state": status["state"],
            "reason": status["reason"],
            "counters": status["counters"],
            "patched": any(target["patched"] for target in status["targets"]),
        }

    def equal(self, tokens: dict[str, list[int]]) -> bool:
        return tokens == {i: full[: len(tokens[i])] for i, full in self.unpatched.items()}


def no_side_stream(bench: Bench) -> dict[str, Any]:
    """Outside graphs, in a prefill."""
    with without_side_stream():
        ascend_opt.enable("mlp-prefetch", **EVERYWHERE)
        return bench.end("mlp-prefetch")


def no_npu_prefetch(bench: Bench) -> dict[str, Any]:
    """Outside graphs, in a prefill."""
    with without_npu_prefetch():
        ascend_opt.enable("mlp-prefetch", **EVERYWHERE)
        return bench.end("mlp-prefetch")


def raising_fill(at: int) -> Callable[[Bench], dict[str, Any]]:
    """sync-elision fails at one step; upstream's own method takes over in that step."""

    def fault(bench: Bench) -> dict[str, Any]:
        from ascend_opt_passes.sync_elision import SyncElision

        original, calls = SyncElision._fill, 0

        def fill(self: Any, *args: Any, **kwargs: Any) -> bool:
            nonlocal calls
            calls += 1
            if calls == at:
                raise RuntimeError("the buffers are gone")
            return original(self, *args, **kwargs)

        SyncElision._fill = fill  # type: ignore[method-assign]
        ascend_opt.enable("sync-elision")
        end = bench.end("sync-elision", steps=110)
        SyncElision._fill = original  # type: ignore[method-assign]
        return end

    return fault


FAULTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "no side stream": no_side_stream,
    "no npu_prefetch": no_npu_prefetch,
    "fill at 1": raising_fill(1),
    "fill at 100": raising_fill(100),
}


def main() -> None:
    ascend_opt.enable("mlp-prefetch", where="graph")
    from vllm import LLM

    with without_npu_prefetch():
        engine = LLM(sys.argv[1], **KEYWORDS).llm_engine
    bench = Bench(engine)
    captured = bench.serve(12)
    status = next(s.as_dict() for s in ascend_opt.status() if s.name == "mlp-prefetch")
    ascend_opt.disable("mlp-prefetch")
    bench.unpatched = bench.serve(110)
    results: dict[str, Any] = {"capture": {**status, "equal": bench.equal(captured)}}
    for name, fault in FAULTS.items():
        results[name] = fault(bench)
    results["tokens"] = bench.unpatched
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
