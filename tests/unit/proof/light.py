"""A light vLLM and a third party's passes: real child processes and patches, without an engine.

Only what `engine_child` touches is there. The "model" has three layers that compute with whole
numbers, so a wrong pass gives a wrong token and not a crash.
"""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ascend_opt import registry
from ascend_opt.cli import main

VLLM = {
    "vllm/__init__.py": """
        from vllm.engine import EngineArgs, LLMEngine, SamplingParams
        """,
    "vllm/envs.py": "environment_variables = {}\n",
    "vllm/sampling_params.py": """
        class RequestOutputKind:
            DELTA = 1
        """,
    "vllm/usage/__init__.py": "",
    "vllm/usage/usage_lib.py": """
        class UsageContext:
            LLM_CLASS = 1
        """,
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": """
        from argparse import ArgumentParser as FlexibleArgumentParser
        """,
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/worker_base.py": """
        class WorkerBase:
            def __init__(self, vllm_config, rank=0):
                self.vllm_config = vllm_config
                self.rank = rank
        """,
    "vllm/model.py": """
        import time

        class Layer:
            def __init__(self, index):
                self.index = index

            def forward(self, x):
                return (31 * x + self.index) % 95

        class Runner:
            def __init__(self, work_s):
                self.layers = [Layer(index) for index in range(3)]
                self.work_s = work_s

            def execute_model(self, scheduler_output):
                self.prepare(len(scheduler_output.num_scheduled_tokens))

            def prepare(self, num_requests):
                time.sleep(self.work_s)

            def execute(self, state):
                for layer in self.layers:
                    state = layer.forward(state)
                return 32 + state
        """,
    "vllm/engine.py": """
        import dataclasses
        import os
        import types
        from types import SimpleNamespace as Space

        @dataclasses.dataclass
        class EngineArgs:
            model: str = ""
            max_model_len: int = 64
            work_s: float = 0.0
            fails: bool = False
            worker_extension_cls: str = ""

            @staticmethod
            def add_cli_args(parser):
                parser.add_argument("--model")
                parser.add_argument("--max-model-len", type=int, default=64)
                parser.add_argument("--work-s", type=float, default=0.0)
                parser.add_argument("--fails", action="store_true")
                parser.add_argument("--worker-extension-cls", default="")
                return parser

            @classmethod
            def from_cli_args(cls, parsed):
                return cls(**vars(parsed))

        @dataclasses.dataclass
        class SamplingParams:
            max_tokens: int
            temperature: float
            ignore_eos: bool
            logprobs: int | None
            output_kind: int

        class LLMEngine:
            @classmethod
            def from_engine_args(cls, arguments, usage_context):
                return cls(arguments)

            def __init__(self, arguments):
                from ascend_opt.vllm_plugin import register
                register()
                if arguments.fails:
                    raise MemoryError("out of memory")
                from vllm.v1.worker.worker_base import WorkerBase
                bases = (WorkerBase,)
                if arguments.worker_extension_cls:
                    import importlib
                    module, _, name = arguments.worker_extension_cls.rpartition(".")
                    bases += (getattr(importlib.import_module(module), name),)
                model_config = Space(
                    model=arguments.model,
                    dtype="int",
                    max_model_len=arguments.max_model_len,
                    enforce_eager=True,
                    get_vocab_size=lambda: 95,
                )
                self.vllm_config = Space(
                    model_config=model_config,
                    scheduler_config=Space(max_num_seqs=8, max_num_batched_tokens=64),
                    parallel_config=Space(tensor_parallel_size=1, pipeline_parallel_size=1),
                )
                self.worker = type("Worker", bases, {})(self.vllm_config)
                from vllm.model import Runner
                self.runner = self.worker.model_runner = Runner(arguments.work_s)
                self.requests = {}

            def get_tokenizer(self):
                return Space(encode=lambda text, **_: [ord(c) % 95 for c in text])

            def add_request(self, name, prompt, sampling):
                self.requests[name] = [sum(prompt["prompt_token_ids"]) % 95, sampling, 0]

            def has_unfinished_requests(self):
                return bool(self.requests)

            def step(self):
                tokens = dict.fromkeys(self.requests, 1)
                self.runner.execute_model(Space(num_scheduled_tokens=tokens))
                outputs = []
                for name, request in list(self.requests.items()):
                    state, sampling, done = request
                    token = self.runner.execute(state)
                    logprob = Space(logprob=-0.5, decoded_token=chr(token))
                    logprobs = [{token: logprob}] if sampling.logprobs else None
                    completion = Space(token_ids=[token], logprobs=logprobs)
                    last = done + 1 == sampling.max_tokens
                    outputs.append(Space(request_id=name, outputs=[completion], finished=last))
                    request[0], request[2] = token - 32, done + 1
                    if last:
                        del self.requests[name]
                return outputs

            def collective_rpc(self, method, args=()):
                return [getattr(self.worker, method)(*args)]
        """,
}

PASSES = """
    import os
    import signal
    from dataclasses import dataclass

    from ascend_opt import Pass, difference, hookimpl, host_patch, shadow_of
    from ascend_opt.targets import Target, locate

    def patch(target):
        return host_patch(target, known={locate(Target.parse(target)).fingerprint: "here"})

    LAYER = patch("vllm.model:Layer.forward")
    EXECUTE = patch("vllm.model:Runner.execute")
    PREPARE = patch("vllm.model:Runner.prepare")
    seen = set()

    class Base(Pass):
        origin = remove_when = "test"

        def call(self, wrapped, args):
            self.counters["steps"] += 1
            return wrapped(*args)

    class Right(Base):
        '''Change nothing.'''
        name = "right"

        @PREPARE
        def prepare(self, wrapped, runner, args, kwargs):
            return self.call(wrapped, args)

    class WrongLayer(Base):
        '''Wrong in one layer only, and harmless in its other target.'''
        name = "wrong-layer"

        @EXECUTE
        def execute(self, wrapped, runner, args, kwargs):
            return self.call(wrapped, args)

        @LAYER
        def forward(self, wrapped, layer, args, kwargs):
            return self.call(wrapped, args) + (layer.index == 1)

        @shadow_of(forward)
        def compare_forward(self, layer, args, kwargs):
            result = yield
            return [difference("x", [result], [result + (layer.index == 1)], "request {}".format)]

    class Crash(Base):
        '''End the process.'''
        name = "crash"

        @EXECUTE
        def execute(self, wrapped, runner, args, kwargs):
            os.kill(os.getpid(), signal.SIGSEGV)

    class First(Base):
        '''Right by itself.'''
        name = "first"

        @PREPARE
        def prepare(self, wrapped, runner, args, kwargs):
            seen.add("first")
            return self.call(wrapped, args)

    class Second(Base):
        '''Wrong, but only when `first` is on too.'''
        name = "second"

        @EXECUTE
        def execute(self, wrapped, runner, args, kwargs):
            return self.call(wrapped, args) + ("first" in seen)

    class Idle(Base):
        '''Never called.'''
        name = "idle"

        @patch("vllm.model:Layer.__init__")
        def init(self, wrapped, layer, args, kwargs):
            return wrapped(*args)

    class CrashAtStart(Base):
        '''End the process before it can serve.'''
        name = "crash-at-start"

        @patch("vllm.model:Runner.__init__")
        def init(self, wrapped, runner, args, kwargs):
            os._exit(1)

    @dataclass(frozen=True)
    class Speed:
        speed: int = 1

    class Fast(Base):
        '''Skip the work.'''
        name = "fast"
        Parameters = Speed

        @PREPARE
        def prepare(self, wrapped, runner, args, kwargs):
            self.counters["steps"] += 1

    @hookimpl
    def ascend_opt_passes():
        return [Right, WrongLayer, Crash, First, Second, Idle, CrashAtStart, Fast]
"""


def install(directory: Path) -> Path:
    """Write vLLM, the passes' distribution and a model; return the model's directory."""
    for name, text in {**VLLM, "third_party.py": PASSES}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    information = directory / "third_party-1.0.dist-info"
    information.mkdir()
    metadata = "Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n"
    (information / "METADATA").write_text(metadata)
    points = "[ascend_opt.passes]\nthird-party = third_party\n"
    (information / "entry_points.txt").write_text(points)
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


@pytest.fixture
def light_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """A light vLLM and a third party's passes, here and in child processes; invokes a command."""
    site = tmp_path / "light"
    site.mkdir()
    model = install(site)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(p for p in (str(site), inherited) if p)
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hidden = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "vllm"}
    for name in hidden:
        del sys.modules[name]
    registry.discover.cache_clear()

    def invoke(command: str, *arguments: Any) -> Result:
        return CliRunner().invoke(main, [command, "--model", str(model), *arguments])

    yield invoke
    registry.discover.cache_clear()
    for name in [n for n in sys.modules if n.partition(".")[0] in ("vllm", "third_party")]:
        del sys.modules[name]
    sys.modules.update(hidden)
