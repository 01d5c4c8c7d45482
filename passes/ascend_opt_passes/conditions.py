"""Conditions on an engine that several of these passes have."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from ascend_opt import EngineCondition


class ModelRunnerV2(EngineCondition):
    """The worker is going to build Model Runner V2.

    Asks what `NPUWorker` itself asks, by its source: the environment up to 0.22.1rc1, the engine's
    configuration since; and some releases fall back to V1 on one release of vLLM, with a warning.
    """

    name = "model-runner-v2"
    description = "the worker runs Model Runner V2"

    _FALLBACK = re.compile(r"use_v2_model_runner and vllm_version_is\(\s*[\"']([^\"']+)")

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        worker = sys.modules.get("vllm_ascend.worker.worker")
        source = inspect.getsource(worker.NPUWorker.__init__) if worker is not None else ""
        if "vllm_config.use_v2_model_runner" in source:
            chosen = subject.use_v2_model_runner
        else:
            from vllm import envs

            chosen = envs.VLLM_USE_V2_MODEL_RUNNER
        if not chosen:
            return "Model Runner V1 (VLLM_USE_V2_MODEL_RUNNER is not set)"
        fallback = self._FALLBACK.search(source)
        if worker is not None and fallback and worker.vllm_version_is(fallback[1]):
            return f"Model Runner V1 (this vllm-ascend falls back to it on vLLM {fallback[1]})"
        return None
