"""What verify, bisect, bench and tune have in common: the engine that the user described."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_opt import registry
from ascend_opt.config import Request
from ascend_opt.proof.comparison import LOGPROBS
from ascend_opt.proof.engine_run import EngineProcess, Job, Outcome, PromptSpec, run
from ascend_opt.proof.model import Model
from ascend_opt.proof.workspace import Progress, Workspace
from ascend_opt.shadow import COMPARED
from ascend_opt.states import Mode

Requests = Mapping[str, Request]

# The scheduler in the client's process sees all requests before the first step, so every run has
# the same batches; in a process of its own it starts with those that happen to have arrived.
SAME_BATCHES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Subject:
    """The engine under proof.

    Attributes:
        model: The model.
        arguments: The user's arguments of vLLM.
        python: Command that starts Python with the packages of the engine.
        timeout_s: When to give up on a start or a generation.
    """

    model: Model
    arguments: tuple[str, ...] = ()
    python: tuple[str, ...] = (sys.executable,)
    timeout_s: float = 1800

    def job(self, requests: Requests, environment: Mapping[str, str]) -> Job:
        """Return the job of an engine with these passes on; unpatched if there are none."""
        return Job(
            model=self.model.path,
            arguments=(*self.model.arguments, *self.arguments),
            passes={name: r.as_plain() for name, r in requests.items()} if requests else None,
            environment={**self.model.variables(), **environment},
        )


class Runner:
    """Runs the subject, with progress, and keeps what comes of it.

    Args:
        subject: The engine.
        workspace: Where logs and outcomes go.
        progress: What the user sees.
    """

    def __init__(self, subject: Subject, workspace: Workspace, progress: Progress) -> None:
        self.subject = subject
        self.workspace = workspace
        self.progress = progress

    def generate(
        self,
        name: str,
        text: str,
        requests: Requests,
        prompts: Sequence[PromptSpec],
        max_tokens: int,
    ) -> Outcome:
        """Generate once in an engine of its own, always with the same batches.

        Args:
            name: Of the files that are kept.
            text: What the user sees meanwhile.
            requests: The passes that are on.
            prompts: See `Job`.
            max_tokens: Tokens for each prompt.

        Raises:
            EngineInputError, EngineRunError: See `engine_run.run`.
        """
        environment = {k: v for k, v in SAME_BATCHES.items() if k not in os.environ}
        job = dataclasses.replace(
            self.subject.job(requests, environment),
            prompts=prompts,
            max_tokens=max_tokens,
            logprobs=LOGPROBS,
        )
        with self.progress.stage(text):
            outcome = run(
                job,
                python=self.subject.python,
                timeout_s=self.subject.timeout_s,
                directory=self.workspace.path,
                name=name,
                progress=self.progress.update,
                waiting=self.progress.waiting,
            )
        self.workspace.write(f"{name}.json", dataclasses.asdict(outcome))
        self.progress.say(
            f"{text}: started in {outcome.start_s:.0f} s, "
            f"{sum(map(len, outcome.tokens))} tokens in {outcome.generate_s:.1f} s"
        )
        return outcome

    def engine(
        self, name: str, requests: Requests, arguments: tuple[str, ...] = ()
    ) -> EngineProcess:
        """Start an engine that stays; it is not up before its `started()` returns.

        Args:
            name: Of its log.
            requests: The passes that are on.
            arguments: Of vLLM, before the user's.
        """
        job = self.subject.job(requests, {})
        return EngineProcess(
            dataclasses.replace(job, arguments=(*arguments, *job.arguments)),
            python=self.subject.python,
            timeout_s=self.subject.timeout_s,
            directory=self.workspace.path,
            name=name,
            waiting=self.progress.waiting,
        )


def effects(requests: Requests) -> dict[str, str]:
    """Return pass name to the counter that says it did its work."""
    return {
        name: COMPARED if r.mode is Mode.SHADOW else registry.discover().get(name).cls.effect
        for name, r in requests.items()
    }


def as_plain(requests: Requests) -> dict[str, Any]:
    """Return the passes as they would stand in a configuration."""
    return {name: request.as_plain() for name, request in requests.items()}
