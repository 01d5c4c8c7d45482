"""Running engines in processes of their own: tokens, timings, states come back as values.

Every engine is a fresh process in a session of its own, with its own record directory and compile
cache, so that nothing of one run, a patch least of all, can reach another, and so that all of its
descendants can be ended together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascend_opt import reporting
from ascend_opt.config import ENVIRONMENT
from ascend_opt.errors import AscendOptError

PromptSpec = str | Sequence[int] | Mapping[str, int]
"""A text, token ids, or one of the made prompts that `engine_child` describes."""

Progress = Callable[[int, int], None]
"""Called with the number of finished requests and of all requests."""

_POLL_S = 0.02
_GRACE_S = 20.0  # for an engine to end by itself, before it is made to


class EngineRunError(AscendOptError, RuntimeError):
    """The engine did not start or did not finish; the message ends with the tail of its log."""


class EngineInputError(AscendOptError, ValueError):
    """vLLM does not take these arguments or these prompts; the message is vLLM's."""


@dataclass(frozen=True)
class Job:
    """What an engine is to do.

    Attributes:
        model: Path of a checkpoint.
        prompts: Texts, or lists of token ids, or made prompts.
        max_tokens: Tokens to generate for each prompt (greedy, past the end token).
        engine: Arguments of `vllm.EngineArgs`.
        passes: The `passes` mapping of a configuration; None runs unpatched.
        environment: Variables over the caller's.
        arguments: Like `engine`, as words of vLLM's own command line.
        logprobs: Most likely tokens whose logprobs come back at each position; None for none.
    """

    model: str
    prompts: Sequence[PromptSpec] = ()
    max_tokens: int = 32
    engine: Mapping[str, Any] = field(default_factory=dict)
    passes: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    logprobs: int | None = None


@dataclass(frozen=True)
class Generated:
    """One request's answer.

    Attributes:
        tokens: Token ids.
        logprobs: For each position `[token id, logprob, text]`, the chosen token first; empty
            unless asked for.
        prompt_tokens: Length of the prompt in tokens.
        first_s: Seconds from handing the request over to its first token.
        last_s: The same, to its last.
    """

    tokens: list[int]
    logprobs: list[list[list[Any]]]
    prompt_tokens: int
    first_s: float
    last_s: float


@dataclass(frozen=True)
class Batch:
    """Requests that were handed over together.

    Attributes:
        answers: In the order of the prompts.
        wall_s: Seconds until the last had finished.
    """

    answers: list[Generated]
    wall_s: float


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        tokens: Token ids, one list for each prompt.
        records: The record of each process that had passes, as `status --json` prints it.
        start_s: Seconds to import vLLM and start the engine.
        generate_s: Seconds to generate.
        logprobs: See `Generated`, one list for each prompt.
        prompt_tokens: Length of each prompt in tokens.
        facts: Versions, device and engine configuration, for a report.
        details: What else a serving module of one's own measured.
    """

    tokens: list[list[int]]
    records: list[dict[str, Any]]
    start_s: float
    generate_s: float
    logprobs: list[list[list[list[Any]]]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
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


class EngineProcess:
    """A live engine that takes commands; leave the `with` block to end it and all it started.

    Commands go to the child's standard input, which every launcher passes on; answers come back
    as lines appended to a file, so what the engine had finished survives it.

    Args:
        job: Model, arguments, passes and environment; its prompts are not looked at.
        python: Command that starts Python with the packages of the engine.
        timeout_s: When to give up on the start, and on each command.
        directory: Where log and answers are kept; a temporary one if left out.
        name: What the engine is called in file names and messages.
        waiting: Called every now and then while there is nothing to say.
        module: What runs in the child: `python -m MODULE JOB.json ANSWERS`.
    """

    def __init__(
        self,
        job: Job,
        *,
        python: Sequence[str] = (sys.executable,),
        module: str = "ascend_opt.proof.engine_child",
        timeout_s: float = 600,
        directory: Path | None = None,
        name: str = "engine",
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._name = name
        self._waiting = waiting
        self._scratch = Path(tempfile.mkdtemp(prefix="ascend_opt-run-"))
        kept = directory or self._scratch
        self.log = kept / f"{name}.log"
        self._answers_path = kept / f"{name}.jsonl"
        self._answers_path.write_bytes(b"")
        self._position = 0
        setup = self._scratch / "job.json"
        setup.write_text(json.dumps(dataclasses.asdict(job)))
        command = [*python, "-m", module, str(setup), str(self._answers_path)]
        with self.log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=self._environment(job),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                shutil.rmtree(self._scratch, ignore_errors=True)
                raise EngineRunError(f"cannot run {python[0]}: {error.strerror}") from None

    def _environment(self, job: Job) -> dict[str, str]:
        return {
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self._scratch / "cache"),
            ENVIRONMENT: "off" if job.passes is None else json.dumps({"passes": job.passes}),
            reporting.ENVIRONMENT: str(self._scratch / "records"),
            **job.environment,
        }

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(patient=kind is None)

    def started(self) -> dict[str, Any]:
        """Wait until the engine can take requests; return its facts and `start_s`.

        Raises:
            EngineInputError: vLLM does not take the arguments.
            EngineRunError: It did not start.
        """
        return self._await("started")

    def generate(
        self,
        prompts: Sequence[PromptSpec],
        max_tokens: int,
        *,
        logprobs: int | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Batch:
        """Generate greedily, all prompts at once, past the end token.

        Raises:
            EngineInputError: A prompt does not fit.
            EngineRunError: The engine died or took too long.
        """
        self._command("generate", prompts=prompts, max_tokens=max_tokens, logprobs=logprobs)
        answers: dict[int, Generated] = {}

        def keep(answer: dict[str, Any]) -> None:
            index = answer.pop("request")
            answers[index] = Generated(**answer)
            progress(len(answers), len(prompts))

        end = self._await("generated", finished=keep)
        return Batch([answers[index] for index in sorted(answers)], end["wall_s"])

    def records(self) -> list[dict[str, Any]]:
        """Return the record of each process of the engine, once they are up to date."""
        self._command("records")
        found: list[dict[str, Any]] = self._await("records")["records"]
        return found

    def ask(
        self,
        command: str,
        finished: Callable[[dict[str, Any]], None] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Send a command that has one answer of the same name.

        Args:
            command: The command.
            finished: Called with each part that is finished before.
            arguments: Of the command.
        """
        self._command(command, **arguments)
        return self._await(command, finished)

    def outcome(self) -> Outcome:
        """Wait for a module that does the whole job by itself and writes one `Outcome`.

        Raises:
            EngineRunError: It failed or took too long.
        """
        until = time.monotonic() + self._timeout_s
        while (code := self._process.poll()) is None:
            self._check_time(until)
            self._waiting()
            time.sleep(_POLL_S)
        text = self._answers_path.read_text()
        if code != 0 or not text:
            raise self._ended(code)
        return Outcome(**json.loads(text))

    def _command(self, command: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        line = json.dumps({"do": command, **arguments}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # it died: `_await` says how
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _await(
        self, wanted: str, finished: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        until = time.monotonic() + self._timeout_s
        while True:
            code = self._process.poll()  # before reading, so that its last words are read
            for answer in self._answers():
                kind = answer.pop("kind")
                if kind == wanted:
                    return answer
                if kind == "input":
                    raise EngineInputError(answer["message"])
                if kind == "finished" and finished is not None:
                    finished(answer)
            if code is not None:
                raise self._ended(code)
            self._check_time(until)
            self._waiting()
            time.sleep(_POLL_S)

    def _ended(self, code: int) -> EngineRunError:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EngineRunError(f"the {self._name} engine ended with {how}\n{self.tail()}")

    def _check_time(self, until: float) -> None:
        if time.monotonic() > until:
            raise EngineRunError(
                f"the {self._name} engine took more than {self._timeout_s:.0f} s\n{self.tail()}"
            )

    def _answers(self) -> Iterator[dict[str, Any]]:
        with self._answers_path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._position += len(line)
                yield json.loads(line)

    def tail(self, lines: int = 40) -> str:
        """Return the last lines of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self, patient: bool = True) -> None:
        """End the engine and everything that it started.

        Args:
            patient: Let it end by itself first.
        """
        try:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            if patient:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_S)
        finally:
            _end_session(self._process)
            shutil.rmtree(self._scratch, ignore_errors=True)


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """End all processes of a session that we started; its leader may be gone already."""
    if leader.poll() is None:
        _signal(leader.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(5)
    # Once more, also where the leader has gone: its children may not have.
    _signal(leader.pid, signal.SIGKILL)
    leader.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def run(
    job: Job,
    *,
    python: Sequence[str] = (sys.executable,),
    serve: str | None = None,
    timeout_s: float = 600,
    directory: Path | None = None,
    name: str = "engine",
    progress: Progress = lambda done, total: None,
    waiting: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a job in an engine of its own.

    Args:
        job: What to do.
        serve: Module that does the job instead: called as `python -m MODULE JOB.json OUTCOME.json`.
        python: See `EngineProcess`.
        timeout_s: See `EngineProcess`.
        directory: See `EngineProcess`.
        name: See `EngineProcess`.
        waiting: See `EngineProcess`.
        progress: Called as requests finish.

    Raises:
        EngineInputError: vLLM does not take the arguments or the prompts.
        EngineRunError: The engine failed or took too long.
    """
    with EngineProcess(
        job,
        python=python,
        module=serve or "ascend_opt.proof.engine_child",
        timeout_s=timeout_s,
        directory=directory,
        name=name,
        waiting=waiting,
    ) as engine:
        if serve is not None:
            return engine.outcome()
        facts = engine.started()
        start_s = facts.pop("start_s")
        batch = engine.generate(
            job.prompts, job.max_tokens, logprobs=job.logprobs, progress=progress
        )
        return Outcome(
            tokens=[answer.tokens for answer in batch.answers],
            records=engine.records(),
            start_s=start_s,
            generate_s=batch.wall_s,
            logprobs=[answer.logprobs for answer in batch.answers],
            prompt_tokens=[answer.prompt_tokens for answer in batch.answers],
            facts=facts,
        )
