"""What the passes ask of an engine, without one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from ascend_opt_passes.conditions import ModelRunnerV2


def worker_module(source: str, version: str = "0.23.0") -> ModuleType:
    """Return a `vllm_ascend.worker.worker` whose worker chooses its runner like that."""
    module = ModuleType("vllm_ascend.worker.worker")
    module.vllm_version_is = lambda target: target == version  # type: ignore[attr-defined]
    module.NPUWorker = SimpleNamespace(__init__=source)  # type: ignore[attr-defined]
    return module


CONFIG = "self.use_v2_model_runner = self.vllm_config.use_v2_model_runner\n"
ENVIRONMENT = "self.use_v2_model_runner = envs_vllm.VLLM_USE_V2_MODEL_RUNNER\n"
FALLBACK = 'if self.use_v2_model_runner and vllm_version_is("0.23.0"):\n    ...\n'


class TestModelRunnerV2:
    """Which runner the worker is going to build."""

    @pytest.mark.parametrize(
        ("source", "chosen", "version", "reason"),
        [
            (CONFIG, True, "0.26.0", None),
            (CONFIG, False, "0.26.0", "Model Runner V1 (VLLM_USE_V2_MODEL_RUNNER is not set)"),
            (CONFIG + FALLBACK, True, "0.24.0", None),
            (
                CONFIG + FALLBACK,
                True,
                "0.23.0",
                "Model Runner V1 (this vllm-ascend falls back to it on vLLM 0.23.0)",
            ),
            (ENVIRONMENT, True, "0.18.0", None),
            (ENVIRONMENT, None, "0.18.0", "Model Runner V1 (VLLM_USE_V2_MODEL_RUNNER is not set)"),
        ],
    )
    def test_it_asks_what_the_worker_asks(
        self,
        source: str,
        chosen: bool | None,
        version: str,
        reason: str | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The configuration or the environment, and the releases that fall back to V1."""
        module = worker_module(source, version)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr("inspect.getsource", lambda function: function)
        environment = SimpleNamespace(
            VLLM_USE_V2_MODEL_RUNNER=chosen if source == ENVIRONMENT else not chosen
        )
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=environment))
        config = SimpleNamespace(
            use_v2_model_runner=not chosen if source == ENVIRONMENT else chosen
        )
        assert ModelRunnerV2().unmet(config, None) == reason
