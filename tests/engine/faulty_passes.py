"""Passes with faults, and ones that meet them: a third party's package in the fault suite."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ascend_opt import Pass, hookimpl, host_patch, traced_patch
from ascend_opt.targets import Target, locate

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
EXECUTE = f"{RUNNER}.execute_model"
SAMPLE = f"{RUNNER}.sample_tokens"
RELOAD = f"{RUNNER}.reload_weights"
FLASHINFER = "vllm.v1.attention.backends.flashinfer:FlashInferImpl.forward"
QWEN3 = "vllm.model_executor.models.qwen3:Qwen3ForCausalLM.forward"
GRANITE = "vllm.model_executor.models.granitemoe:GraniteMoeMoE.forward"


def known(target: str) -> dict[str, str]:
    source = locate(Target.parse(target))
    return {} if source is None else {source.fingerprint: "here"}


@dataclass(frozen=True)
class At:
    """At which call to raise."""

    at: int = 1


class Faulty(Pass):
    """Declare what the others have in common."""

    name = "faulty"
    origin = remove_when = "test"

    def count(self) -> int:
        self.counters["steps"] += 1
        return self.counters["steps"]


class Counter(Faulty):
    """Count the steps."""

    name = "counter"

    @host_patch(EXECUTE, known=known(EXECUTE))
    def execute_model(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        self.count()
        return wrapped(*args, **kwargs)


class RaisesBefore(Faulty):
    """Raise before the original has run."""

    name = "raises-before"
    Parameters = At

    @host_patch(EXECUTE, known=known(EXECUTE))
    def execute_model(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        if self.count() == self.parameters.at:
            raise RuntimeError("too early")
        return wrapped(*args, **kwargs)


class RaisesAfter(Faulty):
    """Raise after the original has run: running it again would take the step's tokens twice."""

    name = "raises-after"
    Parameters = At

    @host_patch(SAMPLE, known=known(SAMPLE))
    def sample_tokens(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if self.count() == self.parameters.at:
            raise RuntimeError("too late")
        return result


class Surfacing(Faulty):
    """Raise where a call must not be repeated."""

    name = "surfacing"

    @host_patch(EXECUTE, known=known(EXECUTE), redo=False)
    def execute_model(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        self.count()
        raise RuntimeError("once only")


class MissingMethod(Faulty):
    """Want a method that vLLM does not have."""

    name = "missing-method"

    @host_patch(f"{RUNNER}.no_such_method", known={"0" * 16: "here"})
    def no_such_method(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)


class GoneMethod(Faulty):
    """Want a method that someone has deleted."""

    name = "gone-method"

    @host_patch(EXECUTE, known=known(EXECUTE))
    def execute_model(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    @host_patch(RELOAD, known=known(RELOAD))
    def reload_weights(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)


class FlashInfer(Faulty):
    """Want a target in a module that cannot be imported here."""

    name = "flashinfer"

    @traced_patch(FLASHINFER, known=known(FLASHINFER))
    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **kwargs)


class Importing(Faulty):
    """Import, while patching, what another thread is importing."""

    name = "importing"

    @traced_patch(QWEN3, known=known(QWEN3))
    def qwen3_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        deadline = time.monotonic() + 30
        while "vllm.model_executor.models.granitemoeshared" not in sys.modules:
            assert time.monotonic() < deadline
        import vllm.model_executor.models.granitemoeshared  # noqa: F401

        return lambda *args, **kwargs: original(*args, **kwargs)

    @traced_patch(GRANITE, known=known(GRANITE))
    def granite_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **kwargs)


@hookimpl
def ascend_opt_passes() -> list[type[Pass]]:
    return [
        Counter,
        RaisesBefore,
        RaisesAfter,
        Surfacing,
        MissingMethod,
        GoneMethod,
        FlashInfer,
        Importing,
    ]
