"""Drives one engine through the same requests again and again, with passes switched in between.

Usage: ``phases_program.py MODEL PHASES [KEYWORDS_AS_JSON]``; PHASES is a comma-separated list of
``off``, ``nowait`` (the wrong patch: no wait, but the old buffer) and passes joined by ``+``, which
are enabled for their phase alone. Prints tokens, calls of each step and states as JSON.
"""

import json
import sys
from typing import Any

from engine_program import ARRIVALS, KEYWORDS, prompt

NUM_TOKENS = 12
# The engine is eager, where mlp-prefetch does nothing unless it is told to.
PARAMETERS = {"mlp-prefetch": {"where": "both"}}


class NoWait:
    """An event that nobody waits for."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def synchronize(self) -> None:
        """Return at once: the fault."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


def drive(engine: Any, phase: str) -> dict[str, Any]:
    """Send every request, with ids of this phase, and count each step."""
    from vllm import SamplingParams

    from ascend_opt.simnpu import counters

    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    scheduler = engine.engine_core.engine_core.scheduler
    tokens: dict[str, list[int]] = {}
    steps: list[dict[str, Any]] = []
    preempted: set[str] = set()
    step = 0
    while step <= max(ARRIVALS) or engine.has_unfinished_requests():
        arrived = [index for index, arrival in enumerate(ARRIVALS) if arrival == step]
        for index in arrived:
            engine.add_request(f"{phase}-{index}", prompt(index), greedy)
        before = counters.snapshot()
        outputs = engine.step()
        done = counters.snapshot() - before
        for output in outputs:
            if output.finished:
                index = output.request_id.rpartition("-")[2]
                tokens[index] = list(output.outputs[0].token_ids)
        preempted |= {r for r, request in scheduler.requests.items() if request.num_preemptions}
        steps.append({"calls": done.nonzero(), "replayed": done.replayed["cmo_async"]})
        step += 1
    return {"tokens": tokens, "steps": steps, "preempted": len(preempted)}


def main() -> None:
    import ascend_opt

    model, phases = sys.argv[1], sys.argv[2].split(",")
    keywords = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    from vllm import LLM

    engine: Any = LLM(model, **{**KEYWORDS, **keywords}).llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drive(engine, "warmup")  # what happens once must not be counted
    result: dict[str, Any] = {"runner": f"{type(runner).__module__}.{type(runner).__qualname__}"}
    for number, phase in enumerate(phases):
        key = phase if phase not in result else f"{phase}-{number}"
        states: dict[str, Any] = {}
        if phase == "off":
            result[key] = drive(engine, key)
        elif phase == "nowait":
            event = runner.num_computed_tokens_event
            runner.num_computed_tokens_event = NoWait(event)
            result[key] = drive(engine, key)
            runner.num_computed_tokens_event = event
        else:
            names = phase.split("+")
            try:
                for name in names:
                    ascend_opt.enable(name, **PARAMETERS.get(name, {}))
            except ascend_opt.NotApplicableError as error:
                result[key] = {"error": str(error)}
                continue
            result[key] = drive(engine, key)
            states = {s.name: s.as_dict() for s in ascend_opt.status()}
            for name in names:
                ascend_opt.disable(name)
        result[key]["states"] = states
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
