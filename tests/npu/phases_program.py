"""Drives one engine through the same requests again and again, with passes switched in between.

Usage: ``phases_program.py MODEL PHASES [KEYWORDS_AS_JSON]``; PHASES is a comma-separated list of
``off``, ``nowait`` (the wrong patch: no wait, but the old buffer) and passes joined by ``+``, which
are enabled for their phase; one that the next phase enables, too, stays on in between. A pass may
have a mode, as in ``sync-elision@shadow``. A phase whose name ends with ``!`` has two requests, and
sync-elision is wrong in it (see `plant`). Prints tokens, calls of each step, states and what passes
logged as errors.
"""

import json
import logging
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from engine_program import ARRIVALS, KEYWORDS, prompt

NUM_TOKENS = 12
FEW = (1, 3)  # one prompt of one chunk, one of two
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


class Errors(logging.Handler):
    """Keeps the errors that the passes log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.found.append(record.getMessage())

    def take(self) -> list[str]:
        """Return what came since the last time."""
        taken, self.found = self.found, []
        return taken


def plant() -> Callable[[], None]:
    """Make sync-elision one step behind for request 3, from that request's sixth step on.

    Returns:
        What takes the bug out again.
    """
    from ascend_opt_passes.sync_elision import _Lengths

    fill = _Lengths.fill
    steps = 0

    def wrong(lengths: Any, scheduler_output: Any, req_ids: list[str]) -> bool:
        nonlocal steps
        kept = fill(lengths, scheduler_output, req_ids)
        for row, req_id in enumerate(req_ids):
            if "!-3" in req_id:
                steps += 1
                lengths._seq_lens[row] -= steps >= 6
        return kept

    def remove() -> None:
        _Lengths.fill = fill

    _Lengths.fill = wrong
    return remove


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
    arrivals = dict(enumerate(ARRIVALS))
    if phase.endswith("!"):
        arrivals = {index: arrivals[index] for index in FEW}
    while step <= max(arrivals.values()) or engine.has_unfinished_requests():
        for index in (index for index, arrival in arrivals.items() if arrival == step):
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


def modes(phase: str) -> dict[str, str]:
    """Return pass name to mode of a phase with passes."""
    words = (word.partition("@") for word in phase.removesuffix("!").split("+"))
    return {name: mode or "active" for name, _, mode in words}


def main() -> None:
    import ascend_opt

    model, phases = sys.argv[1], sys.argv[2].split(",")
    keywords = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    from vllm import LLM

    engine: Any = LLM(model, **{**KEYWORDS, **keywords}).llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    errors = Errors()
    logging.getLogger("vllm.ascend_opt").addHandler(errors)
    drive(engine, "warmup")  # what happens once must not be counted
    result: dict[str, Any] = {"runner": f"{type(runner).__module__}.{type(runner).__qualname__}"}
    for number, (phase, following) in enumerate(pairwise([*phases, ""])):
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
            asked = modes(phase)
            remove = plant() if phase.endswith("!") else None
            try:
                for name, mode in asked.items():
                    ascend_opt.enable(name, mode=mode, **PARAMETERS.get(name, {}))
            except ascend_opt.NotApplicableError as error:
                result[key] = {"error": str(error)}
                continue
            result[key] = drive(engine, key)
            states = {s.name: s.as_dict() for s in ascend_opt.status()}
            for name in asked.keys() - modes(following).keys():
                ascend_opt.disable(name)
            if remove is not None:
                remove()
        result[key]["states"] = states
        result[key]["errors"] = errors.take()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
