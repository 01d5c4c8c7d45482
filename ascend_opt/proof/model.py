"""Which model a proof runs: a checkpoint, a cached hub name, or `tiny`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ascend_opt.errors import AscendOptError
from ascend_opt.tiny import write_tiny_model

TINY = "tiny"

_TINY_ARGUMENTS = (
    *("--max-model-len", "1024"),
    *("--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "256"),
    "--enforce-eager",
)
_TINY_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelError(AscendOptError, ValueError):
    """There is no such model."""


@dataclass(frozen=True)
class Model:
    """A model for an engine.

    Attributes:
        path: What vLLM is given as `--model`.
        arguments: vLLM's arguments that come before the user's.
        environment: Variables that the user's environment goes over.
    """

    path: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def variables(self) -> dict[str, str]:
        """Return the variables that the caller has not set."""
        return {name: value for name, value in self.environment if name not in os.environ}


def resolve_model(name: str, scratch: Callable[[str], Path]) -> Model:
    """Find a model.

    Args:
        name: `tiny`, a directory, or a Hugging Face name that is in the local cache.
        scratch: Gives a place for the tiny model.

    Raises:
        ModelError: It is not there.
    """
    if name == TINY:
        path = write_tiny_model(scratch("tiny-qwen3"))
        return Model(str(path), _TINY_ARGUMENTS, tuple(_TINY_ENVIRONMENT.items()))
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"{name}: no config.json in it; expected a checkpoint's directory")
        return Model(name)
    if _HUB_NAME.fullmatch(name) and (_in_cache(name) or os.environ.get("VLLM_USE_MODELSCOPE")):
        return Model(name)
    raise ModelError(
        f"no model at {name}: expected a directory with config.json, a Hugging Face name that is "
        f"in the cache ({_cache()}), or 'tiny'"
    )


def _cache() -> Path:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _in_cache(name: str) -> bool:
    return (_cache() / f"models--{name.replace('/', '--')}").is_dir()
