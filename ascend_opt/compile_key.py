"""Making our patches part of vLLM's compile-cache key.

An artifact that was compiled without a pass would otherwise be loaded for a run with it, and the
reverse. vLLM hashes what the getters in `vllm.envs.environment_variables` return, in both of its
cache paths. Being listed there also makes Ray copy the variable to its workers, and keeps vLLM
from warning of an unknown one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ascend_opt.config import ENVIRONMENT
from ascend_opt.importing import when_imported


def enter(fingerprint: Callable[[], str | None]) -> None:
    """Have vLLM hash what `fingerprint` returns whenever it computes a cache key."""

    def add(envs: ModuleType) -> None:
        envs.environment_variables[ENVIRONMENT] = fingerprint

    when_imported("vllm.envs", add)
