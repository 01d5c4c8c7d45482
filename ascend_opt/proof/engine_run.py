"""Running an engine in a process of its own: tokens, states and counters come back as values.

Every run is a fresh process with its own record directory, so that nothing of one run, a patch
least of all, can reach another.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascend_opt import reporting
from ascend_opt.config import ENVIRONMENT
from ascend_opt.errors import AscendOptError


class EngineRunError(AscendOptError, RuntimeError):
    """The engine did not start or did not finish; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Job:
    """What an engine is to do.

    Attributes:
        model: Path of a checkpoint.
        prompts: Texts, or lists of token ids.
        max_tokens: Tokens to generate for each prompt (greedy, past the end token).
        engine: Arguments of `vllm.LLM`.
        passes: The `passes` mapping of a configuration; None runs unpatched.
        environment: Variables over the caller's.
    """

    model: str
    prompts: Sequence[str | Sequence[int]]
    max_tokens: int = 32
    engine: Mapping[str, Any] = field(default_factory=dict)
    passes: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        tokens: Token ids, one list for each prompt.
        records: The record of each process that had passes, as `status --json` prints it.
        start_s: Seconds to import vLLM and start the engine.
        generate_s: Seconds to generate.
        details: What else the serving module measured.
    """

    tokens: list[list[int]]
    records: list[dict[str, Any]]
    start_s: float
    generate_s: float
    details: dict[str, Any] = field(default_factory=dict)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return pass name to its status in the process where it came furthest."""
        best: dict[str, dict[str, Any]] = {}
        for record in self.records:
            for status in record["passes"]:
                kept = best.get(status["name"])
                if kept is None or (status["state"] != "armed" and kept["state"] == "armed"):
                    best[status["name"]] = status
        return best


def run(
    job: Job,
    *,
    python: Sequence[str] = (sys.executable,),
    serve: str = "ascend_opt.proof.engine_run",
    timeout_s: float = 600,
) -> Outcome:
    """Run a job.

    Args:
        job: What to do.
        python: Command that starts Python with the packages of the engine.
        serve: Module that does the job: called as `python -m MODULE JOB.json OUTCOME.json`.
        timeout_s: When to give up.

    Raises:
        EngineRunError: The engine failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="ascend_opt-run-") as name:
        directory = Path(name)
        request, answer, log = (directory / part for part in ("job.json", "outcome.json", "log"))
        request.write_text(json.dumps(dataclasses.asdict(job)))
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            ENVIRONMENT: "off" if job.passes is None else json.dumps({"passes": job.passes}),
            reporting.ENVIRONMENT: str(directory / "records"),
            **job.environment,
        }
        command = [*python, "-m", serve, str(request), str(answer)]
        with log.open("wb") as output:
            try:
                code = subprocess.run(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise EngineRunError(
                    f"the engine took more than {timeout_s:.0f} s\n{_tail(log)}"
                ) from None
        if code != 0 or not answer.exists():
            raise EngineRunError(f"the engine ended with exit code {code}\n{_tail(log)}")
        return Outcome(**json.loads(answer.read_text()))


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _serve(request: Path, answer: Path) -> None:
    """Do the job, in the child process."""
    job = json.loads(request.read_text())
    begun = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], **job["engine"])
    started = time.monotonic()
    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in job["prompts"]]
    sampling = SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    generated = time.monotonic()
    time.sleep(2 * reporting.INTERVAL_S)  # the last counts are written once in an interval
    outcome = Outcome(
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        records=[record.as_dict() for record in reporting.read_records()],
        start_s=started - begun,
        generate_s=generated - started,
    )
    answer.write_text(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
