"""Injects one fault after another into one running engine, and prints how each of them ended.

Usage: ``faults_program.py MODEL DIRECTORY``. The passes are those of faulty_passes.py, installed by
the test; every fault ends with the engine serving the same prompts, whose tokens are compared with
those of the unpatched engine.
"""

import faulthandler
import functools
import gc
import json
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wrapt

import ascend_opt
from ascend_opt import registry, reporting

PROMPTS = [[32 + (7 * i + k * k) % 95 for k in range(n)] for i, n in enumerate((5, 11, 23))]
STEPS = 110
CYCLES = 50
FLASHINFER = "vllm.v1.attention.backends.flashinfer"
logger = logging.getLogger("vllm.ascend_opt")


class Log(logging.Handler):
    """Keeps what ascend_opt logs, and the error that it logs it with."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = f" {record.exc_info[1]!r}" if record.exc_info else ""
        self.lines.append(record.getMessage() + error)

    def take(self) -> list[str]:
        taken, self.lines = self.lines, []
        return taken


class Bench:
    """The running engine, and what every fault needs of it."""

    def __init__(self, engine: Any, log: Log) -> None:
        self.engine = engine
        self.log = log
        self.unpatched: list[list[int]] = []
        self._runs = 0

    def serve(self, steps: int = 12, until: Callable[[], bool] = lambda: True) -> list[list[int]]:
        """Serve the prompts, again and again until told to stop; return the tokens of each."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        while True:
            self._runs += 1
            for i, prompt in enumerate(PROMPTS):
                name = f"{self._runs}-{i}"
                self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            tokens: dict[str, list[int]] = {}
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
            found = [tokens[f"{self._runs}-{i}"] for i in range(len(PROMPTS))]
            if until() or not self.equal(found):
                return found

    def equal(self, tokens: list[list[int]]) -> bool:
        """Whether these are the unpatched engine's tokens, as far as they go."""
        expected = [full[: len(found)] for full, found in zip(self.unpatched, tokens, strict=True)]
        return tokens == expected and all(tokens)

    def end(self, *names: str, steps: int = 12, **more: Any) -> dict[str, Any]:
        """Serve, and return how the fault ended: tokens, passes by name, what was logged."""
        equal = self.equal(self.serve(steps))
        passes = {name: status(name) for name in names}
        for name in names:
            ascend_opt.disable(name)
        return {"equal": equal, "passes": passes, "log": self.log.take(), **more}


def status(name: str) -> dict[str, Any]:
    return next(s.as_dict() for s in ascend_opt.status() if s.name == name)


def refusal(name: str, **parameters: Any) -> str:
    """Enable a pass that cannot be on; return the error."""
    try:
        ascend_opt.enable(name, **parameters)
    except ascend_opt.AscendOptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unimportable_pass(bench: Bench) -> dict[str, Any]:
    """A distribution whose pass module raises at import."""
    return bench.end(problems=registry.discover().problems, error=refusal("unimportable"))


def unimportable_target(bench: Bench) -> dict[str, Any]:
    """A real module of vLLM that raises at import here, twice."""
    ascend_opt.enable("flashinfer")
    errors = []
    for _ in range(2):
        try:
            __import__(FLASHINFER)
        except ImportError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return bench.end("flashinfer", errors=errors)


def missing_method(bench: Bench) -> dict[str, Any]:
    """A target that this vLLM never had."""
    return bench.end(error=refusal("missing-method"))


def gone_method(bench: Bench) -> dict[str, Any]:
    """A target that is in the source, and that someone has deleted from the class."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    method = GPUModelRunner.reload_weights
    del GPUModelRunner.reload_weights
    error = refusal("gone-method")
    GPUModelRunner.reload_weights = method
    return bench.end(error=error)


def raising(name: str, at: int) -> Callable[[Bench], dict[str, Any]]:
    """A wrapper raises at one step."""

    def fault(bench: Bench) -> dict[str, Any]:
        ascend_opt.enable(name, at=at)
        return bench.end(name, steps=STEPS)

    return fault


def raising_backend(at: int) -> Callable[[Bench], dict[str, Any]]:
    """mlp-prefetch's backend raises at one call, inside the custom op."""

    def fault(bench: Bench) -> dict[str, Any]:
        from ascend_opt.devices import RecordBackend

        original, calls = RecordBackend.prefetch, 0

        def prefetch(self: Any, *args: Any) -> int:
            nonlocal calls
            calls += 1
            if calls >= at:
                raise RuntimeError("the device is lost")
            return original(self, *args)

        RecordBackend.prefetch = prefetch  # type: ignore[method-assign]
        ascend_opt.enable("mlp-prefetch", backend="record")
        end = bench.end("mlp-prefetch", steps=24)
        RecordBackend.prefetch = original  # type: ignore[method-assign]
        return {**end, "calls": calls}

    return fault


def op_registered_twice(bench: Bench) -> dict[str, Any]:
    """Someone else has defined our custom op; afterwards they take theirs back."""
    import torch

    theirs = torch.library.Library("ascend_opt", "FRAGMENT")
    theirs.define("prefetch(Tensor x) -> ()")
    error = refusal("mlp-prefetch", backend="record")
    while_there = bench.end("mlp-prefetch", error=error)
    theirs._destroy()
    ascend_opt.enable("mlp-prefetch", backend="record")
    return {"while_there": while_there, "afterwards": bench.end("mlp-prefetch")}


def _runner_class() -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


class Wrapt:
    """A library that wraps with wrapt."""

    def patch(self) -> None:
        self.calls = 0

        def wrapper(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
            self.calls += 1
            return wrapped(*args, **kwargs)

        wrapt.wrap_function_wrapper(_runner_class(), "execute_model", wrapper)
        self.ours = vars(_runner_class())["execute_model"]

    def unpatch(self) -> None:
        wrapt.unwrap_object(_runner_class(), "execute_model", self.ours)


class Closure:
    """A library that puts a closure in the method's place, and can put back what was there."""

    def patch(self) -> None:
        self.calls = 0
        self.before = original = vars(_runner_class())["execute_model"]

        @functools.wraps(original)
        def closure(runner: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(runner, *args, **kwargs)

        _runner_class().execute_model = closure

    def unpatch(self) -> None:
        _runner_class().execute_model = self.before


def foreign_before(make: Callable[[], Any]) -> Callable[[Bench], dict[str, Any]]:
    """Someone's patch is there when ours comes; then they take it out, and ours comes again."""

    def fault(bench: Bench) -> dict[str, Any]:
        original = vars(_runner_class())["execute_model"]
        foreign = make()
        foreign.patch()
        error = refusal("counter")
        while_there = bench.end("counter", error=error)
        while_there["theirs"] = foreign.calls
        foreign.unpatch()
        ascend_opt.enable("counter")
        afterwards = bench.end("counter")
        restored = vars(_runner_class())["execute_model"] is original
        return {"while_there": while_there, "afterwards": afterwards, "restored": restored}

    return fault


def foreign_after(make: Callable[[], Any]) -> Callable[[Bench], dict[str, Any]]:
    """Someone patches over ours; ours is to go first, then theirs."""

    def fault(bench: Bench) -> dict[str, Any]:
        original = vars(_runner_class())["execute_model"]
        ascend_opt.enable("counter")
        foreign = make()
        foreign.patch()
        equal = bench.equal(bench.serve())
        both = {"equal": equal, "passes": {"counter": status("counter")}, "theirs": foreign.calls}
        error = ""
        try:
            ascend_opt.disable("counter")
        except ascend_opt.RevertError as refused:
            error = str(refused)
        before = foreign.calls
        equal = bench.equal(bench.serve())
        out = {"equal": equal, "passes": {"counter": status("counter")}, "error": error}
        out["theirs"] = foreign.calls - before
        foreign.unpatch()
        return {
            "both": both,
            "out": out,
            "afterwards": bench.end("counter"),
            "restored": vars(_runner_class())["execute_model"] is original,
        }

    return fault


def foreign_restores_too_much(bench: Bench) -> dict[str, Any]:
    """Someone saved the original before us, and puts it back over our patch."""
    original = vars(_runner_class())["execute_model"]
    ascend_opt.enable("counter")
    _runner_class().execute_model = original
    end = bench.end("counter")
    return {**end, "restored": vars(_runner_class())["execute_model"] is original}


def threads_and_imports(bench: Bench) -> dict[str, Any]:
    """Two threads enable passes while a third imports their targets; one pass imports, too."""
    models = [f"vllm.model_executor.models.{name}" for name in ("granitemoe", "granitemoeshared")]
    there = [name for name in models if name in sys.modules]
    barrier, errors = threading.Barrier(3), []

    def run(work: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            work()
        except Exception as error:
            errors.append(repr(error))

    works = [
        lambda: ascend_opt.enable("importing"),
        lambda: [(ascend_opt.enable("counter"), ascend_opt.status()) for _ in range(5)],
        lambda: __import__(models[1]),
    ]
    faulthandler.dump_traceback_later(60, exit=True)  # a deadlock ends the program, and says where
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    faulthandler.cancel_dump_traceback_later()
    return bench.end("importing", "counter", errors=errors, there=there)


def _residents() -> dict[str, int]:
    time.sleep(2.5 * reporting.INTERVAL_S)  # the thread that writes records is done with its file
    gc.unfreeze()  # a frozen object is neither collected nor listed
    gc.collect()
    objects = gc.get_objects()
    wrappers = sum(issubclass(type(o), wrapt.FunctionWrapper) for o in objects)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "wrappers": wrappers,
        "objects": len(objects),
        "KiB": pages * resource.getpagesize() // 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def cycles_under_load(bench: Bench) -> dict[str, Any]:
    """A host pass and a traced one go on and off 50 times, while the engine serves."""
    original = vars(_runner_class())["execute_model"]
    done = threading.Event()
    errors: list[str] = []

    def cycle(times: int) -> None:
        try:
            for _ in range(times):
                ascend_opt.enable("counter")
                ascend_opt.enable("mlp-prefetch", backend="record")
                time.sleep(0.005)
                ascend_opt.disable("counter")
                ascend_opt.disable("mlp-prefetch")
        except Exception as error:
            errors.append(repr(error))
        done.set()

    def under_load(times: int) -> bool:
        done.clear()
        thread = threading.Thread(target=cycle, args=(times,))
        thread.start()
        equal = bench.equal(bench.serve(until=done.is_set))
        thread.join()
        return equal

    under_load(3)
    before = _residents()
    equal = under_load(CYCLES)
    after = _residents()
    return {
        "equal": equal,
        "errors": errors,
        "growth": {key: after[key] - before[key] for key in after},
        "restored": vars(_runner_class())["execute_model"] is original,
        "log": bench.log.take(),
    }


def fork_after_enable(bench: Bench) -> dict[str, Any]:
    """The engine's process forks; the child looks at the pass, and switches it off for itself."""
    original = vars(_runner_class())["execute_model"]
    ascend_opt.enable("counter")
    bench.serve()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        inherited = status("counter")
        ascend_opt.disable("counter")
        answer = {
            "pid": os.getpid(),
            "inherited": inherited,
            "afterwards": status("counter")["state"],
            "restored": vars(_runner_class())["execute_model"] is original,
        }
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    return {**bench.end("counter"), "child": answer, "pid_of_child": child}


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may become longer: writes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only() -> Iterator[None]:
    """The run directory is one that nobody can write to, root included."""
    directory = os.environ[reporting.ENVIRONMENT]
    os.environ[reporting.ENVIRONMENT] = "/proc/self/task"
    try:
        yield
    finally:
        os.environ[reporting.ENVIRONMENT] = directory


def no_records(injected: Callable[[], Any]) -> Callable[[Bench], dict[str, Any]]:
    """Records cannot be written for a while."""

    def fault(bench: Bench) -> dict[str, Any]:
        directory = reporting.run_directory()

        def written(state: str) -> bool:
            """Wait until the file says that the pass is in this state."""
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                for record in reporting.read_records(directory):
                    for found in record.passes:
                        if (found.name, found.state) == ("counter", state):
                            return True
                time.sleep(0.05)
            return False

        assert written("off")
        with injected():
            ascend_opt.enable("counter")
            time.sleep(2.5 * reporting.INTERVAL_S)
            end = bench.end(log_of_fault=bench.log.take())
            kept = status("counter")
            left = sorted(path.name for path in directory.iterdir() if path.name.startswith("."))
        again = written("active")
        ascend_opt.disable("counter")
        return {**end, "passes": {"counter": kept}, "written_again": again, "left": left}

    return fault


def surfacing(bench: Bench) -> dict[str, Any]:
    """A wrapper that must not be repeated raises before the original has run."""
    ascend_opt.enable("surfacing")
    error, notes = "", []
    try:
        bench.serve()
    except RuntimeError as surfaced:
        error, notes = repr(surfaced), surfaced.__notes__
    return {
        "error": error,
        "notes": notes,
        "passes": {"surfacing": status("surfacing")},
        "log": bench.log.take(),
    }


FAULTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "unimportable pass": unimportable_pass,
    "unimportable target": unimportable_target,
    "missing method": missing_method,
    "gone method": gone_method,
    **{
        f"{name} at {at}": raising(name, at)
        for name in ("raises-before", "raises-after")
        for at in (1, 100)
    },
    "op registered twice": op_registered_twice,
    **{f"backend at {at}": raising_backend(at) for at in (1, 100)},
    "wrapt before": foreign_before(Wrapt),
    "closure before": foreign_before(Closure),
    "wrapt after": foreign_after(Wrapt),
    "closure after": foreign_after(Closure),
    "restores too much": foreign_restores_too_much,
    "threads and imports": threads_and_imports,
    "cycles": cycles_under_load,
    "fork": fork_after_enable,
    "no room": no_records(no_room),
    "read only": no_records(read_only),
    "surfacing": surfacing,  # last: what the engine was doing is lost
}


def main() -> None:
    log = Log()
    logger.addHandler(log)
    from vllm import LLM

    engine = LLM(
        sys.argv[1],
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        enable_prefix_caching=False,
        seed=0,
    ).llm_engine
    logger.addHandler(log)  # vLLM's own logging configuration took it out
    bench = Bench(engine, log)
    states = {s.name: str(s.state) for s in ascend_opt.status()}
    results: dict[str, Any] = {"start": {"log": log.take(), "states": states}}
    bench.unpatched = bench.serve(STEPS)
    for name, fault in FAULTS.items():
        results[name] = fault(bench)
    results["tokens"] = bench.unpatched
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
