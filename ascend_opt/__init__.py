"""Pluggable optimization passes for an installed vLLM / vllm-ascend, applied by monkeypatching.

    import ascend_opt
    ascend_opt.enable("mlp-prefetch")

Importing this package imports neither torch nor vllm, and its names are loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascend_opt.base import BUILTIN, Pass, Shadow, host_patch, shadow_of, traced_patch
    from ascend_opt.conditions import (
        Condition,
        DenseQwen,
        EngineCondition,
        InstallCondition,
        MaxNumTokens,
        NoKVLoadRecompute,
        NoSpeculator,
        Requires,
        StepCondition,
    )
    from ascend_opt.control import (
        available,
        disable,
        enable,
        enabled,
        explain,
        load_config,
        reset,
        status,
    )
    from ascend_opt.errors import (
        AscendOptError,
        ConfigError,
        DuplicatePassError,
        NotApplicableError,
        ParameterError,
        PatchError,
        RevertError,
        UnknownPassError,
    )
    from ascend_opt.hookspecs import hookimpl
    from ascend_opt.parameters import ByteSize
    from ascend_opt.shadow import difference
    from ascend_opt.states import Explanation, Mode, PassStatus, State

_HOMES = {
    "base": ("BUILTIN", "Pass", "Shadow", "host_patch", "shadow_of", "traced_patch"),
    "conditions": (
        "Condition",
        "DenseQwen",
        "EngineCondition",
        "InstallCondition",
        "MaxNumTokens",
        "NoKVLoadRecompute",
        "NoSpeculator",
        "Requires",
        "StepCondition",
    ),
    "control": (
        "available",
        "disable",
        "enable",
        "enabled",
        "explain",
        "load_config",
        "reset",
        "status",
    ),
    "errors": (
        "AscendOptError",
        "ConfigError",
        "DuplicatePassError",
        "NotApplicableError",
        "ParameterError",
        "PatchError",
        "RevertError",
        "UnknownPassError",
    ),
    "hookspecs": ("hookimpl",),
    "parameters": ("ByteSize",),
    "shadow": ("difference",),
    "states": ("Explanation", "Mode", "PassStatus", "State"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BUILTIN",
    "AscendOptError",
    "ByteSize",
    "Condition",
    "ConfigError",
    "DenseQwen",
    "DuplicatePassError",
    "EngineCondition",
    "Explanation",
    "InstallCondition",
    "MaxNumTokens",
    "Mode",
    "NoKVLoadRecompute",
    "NoSpeculator",
    "NotApplicableError",
    "ParameterError",
    "Pass",
    "PassStatus",
    "PatchError",
    "Requires",
    "RevertError",
    "Shadow",
    "State",
    "StepCondition",
    "UnknownPassError",
    "available",
    "difference",
    "disable",
    "enable",
    "enabled",
    "explain",
    "hookimpl",
    "host_patch",
    "load_config",
    "reset",
    "shadow_of",
    "status",
    "traced_patch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
