"""The process of an engine whose decode steps are timed, one arm after another.

Started like `engine_child`, under simnpu without compute. `measure` puts requests into a steady
decode and takes a turn for each arm in each round: passes in, two steps that are not timed, a timed
one, and one with clocks on the methods that passes patch. The order of the arms is random, since
what a switch leaves behind would else always be in the way of the same arm.
"""

from __future__ import annotations

import gc
import json
import math
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from ascend_opt import control
from ascend_opt.errors import AscendOptError
from ascend_opt.proof.bench import CPU, STEP
from ascend_opt.proof.engine_child import Answers, Commands, Engine, InputError
from ascend_opt.proof.host.profiling import profile
from ascend_opt.proof.host.swap import clocks, switch
from ascend_opt.simnpu import counters

WARM_UP = 12  # steps of steady decode before the first turn
LEAD_IN = 2  # the first steps after a switch look things up
_STEPS_IN_A_TURN = LEAD_IN + 2
_IN_FLIGHT = 8  # steps that scheduling ahead may take more


def steps_of(rounds: int, arms: int) -> int:
    """Return how many tokens each request makes while arms are measured."""
    return WARM_UP + rounds * arms * _STEPS_IN_A_TURN + _IN_FLIGHT


class HostEngine(Engine):
    """An engine in steady decode."""

    def measure(self, command: dict[str, Any], answers: Answers) -> dict[str, Any]:
        """Time the arms; every round is one answer. Returns each arm's record of its passes."""
        arms, rounds = command["arms"], command["rounds"]
        records: dict[str, Any] = {}
        self._decode(command, steps_of(rounds, len(arms)))
        for number in range(rounds):
            turns = {}
            for label, passes in random.Random(number).sample(arms, len(arms)):
                switch(passes)
                turns[label] = self._turn(command["targets"])
                records[label] = _record()
            answers.write("finished", round=number, turns=turns)
        self._drain()
        return records

    def profile(self, command: dict[str, Any]) -> list[list[Any]]:
        """Profile steps with some passes on."""
        self._decode(command, WARM_UP + command["steps"] + _IN_FLIGHT)
        switch(command["passes"])
        self.llm.step()
        found = profile(self.llm.step, command["steps"])
        self._drain()
        return found

    def _decode(self, command: dict[str, Any], tokens: int) -> None:
        """Bring requests into steady decode, all of one length, unpatched."""
        from vllm import SamplingParams

        wanted, length = command["num_requests"], command["input_len"]
        limit = self.config.model_config.max_model_len
        if length + tokens > limit:
            raise InputError(
                f"{length} tokens of prompt and {tokens} steps do not fit into "
                f"max_model_len={limit}: fewer --rounds, or a greater --max-model-len after --"
            )
        switch({})
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        for _ in range(wanted):
            prompt = {"prompt_token_ids": [1 + i % 100 for i in range(length)]}
            self.llm.add_request(str(self._requests), prompt, sampling)
            self._requests += 1
        at_once = self.config.scheduler_config.max_num_batched_tokens
        for _ in range(math.ceil(wanted * length / at_once) + WARM_UP - 4):
            self.llm.step()
        running = len(self.llm.engine_core.engine_core.scheduler.running)
        if running != wanted:
            raise InputError(
                f"{running} of {wanted} requests decode at the same time: give room for all "
                "(--max-num-seqs, or --num-gpu-blocks-override after --)"
            )

    def _drain(self) -> None:
        while self.llm.has_unfinished_requests():
            self.llm.step()
        switch({})

    def _turn(self, targets: list[str]) -> dict[str, Any]:
        step = self.llm.step
        for _ in range(LEAD_IN):
            step()
        before = counters.snapshot()
        gc.disable()  # whose turn it is to pay for garbage is chance
        cpu, begun = time.thread_time(), time.perf_counter()
        step()
        wall_s, cpu_s = time.perf_counter() - begun, time.thread_time() - cpu
        gc.enable()
        calls = (counters.snapshot() - before).calls
        with clocks(targets) as found:
            step()
        methods = {text: 1e3 * c.seconds for text, c in found.items() if c.calls}
        return {
            "times": {STEP.name: 1e3 * wall_s, CPU.name: 1e3 * cpu_s, **methods},
            "calls": calls,
        }


def _record() -> dict[str, Any]:
    """Return this process's passes, in the form of a record file."""
    return {"pid": 0, "rank": 0, "passes": [status.as_dict() for status in control.status()]}


def main(setup_path: str, answers_path: str) -> int:
    """Serve commands until standard input ends."""
    answers = Answers(Path(answers_path))
    commands = Commands()
    try:
        engine = HostEngine(json.loads(Path(setup_path).read_text()))
        answers.write("started", start_s=engine.start_s, **engine.facts())
        for command in commands:
            match command["do"]:
                case "measure":
                    answers.write("measure", records=engine.measure(command, answers))
                case "profile":
                    answers.write("profile", rows=engine.profile(command))
                case "peak":
                    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                    answers.write("peak", gib=kib / 2**20)
    except (InputError, AscendOptError) as error:
        answers.write("input", message=str(error))
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
