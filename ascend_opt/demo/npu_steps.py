"""Child process of the NPU demo: runs an engine step by step and counts driver calls in each."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from ascend_opt import reporting
from ascend_opt.demo.npu import COUNTED, FILL_MS, PREFETCHED
from ascend_opt.proof.engine_run import Outcome
from ascend_opt.simnpu import counters

_METHOD = "_update_seq_lens_cpu"


def _serve(request: Path, answer: Path) -> None:
    job = json.loads(request.read_text())
    begun = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], **job["engine"])
    started = time.monotonic()
    engine: Any = llm.llm_engine
    core = engine.engine_core.engine_core
    clock = _time_method(core.model_executor.driver_worker.worker.model_runner)
    sampling = SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=True)
    for number, prompt in enumerate(job["prompts"]):
        engine.add_request(str(number), prompt, sampling)

    tokens: dict[str, list[int]] = {}
    decode: dict[str, list[float]] = {name: [] for name in (*COUNTED, PREFETCHED, FILL_MS)}
    while engine.has_unfinished_requests():
        decoding = len(tokens) == len(job["prompts"])
        counters.mark(f"{'decode' if decoding else 'prefill'} step")
        clock.clear()
        before = counters.snapshot()
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        step = counters.snapshot() - before
        if decoding and engine.has_unfinished_requests():
            for name, kind in COUNTED.items():
                decode[name].append(step[kind] + step.replayed[kind])
            decode[PREFETCHED].append(step.bytes["cmo_async"] + step.replayed_bytes["cmo_async"])
            decode[FILL_MS].append(sum(clock) * 1e3)
    generated = time.monotonic()
    time.sleep(2 * reporting.INTERVAL_S)
    outcome = Outcome(
        tokens=[tokens[str(number)] for number in range(len(job["prompts"]))],
        records=[record.as_dict() for record in reporting.read_records()],
        start_s=started - begun,
        generate_s=generated - started,
        details={"decode": decode, "placeholders": counters.placeholders()},
    )
    answer.write_text(json.dumps(dataclasses.asdict(outcome)))


def _time_method(runner: Any) -> list[float]:
    """Time each call of the patched method, as it is installed; return the list of seconds."""
    seconds: list[float] = []
    original = getattr(runner, _METHOD)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begun)

    setattr(runner, _METHOD, timed)
    return seconds


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
