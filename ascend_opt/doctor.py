"""`ascend_opt doctor`: why a pass might silently not be on, checked one by one."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from ascend_opt import config, registry, reporting
from ascend_opt.conditions import installed_version
from ascend_opt.engine import EngineWatch
from ascend_opt.errors import AscendOptError

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "ascend_opt"


class Outcome(StrEnum):
    """What a check found."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        name: What was looked at.
        outcome: See `Outcome`; `note` is worth knowing and wrong for nobody.
        found: What was found.
        advice: What to do; empty if nothing.
    """

    name: str
    outcome: Outcome
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """Run every check; changes nothing and imports neither torch nor vllm."""
    return [
        Check("python", Outcome.OK, platform.python_version()),
        *_versions(),
        *_plugin(),
        _configuration(),
        *_passes(),
        _engines(),
        _records(),
    ]


def filtered_out() -> str | None:
    """Return the value of VLLM_PLUGINS if it keeps vLLM from loading ascend_opt, else None."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN in allowed.split(","):
        return None
    return allowed


def _versions() -> Iterator[Check]:
    for name in ("vllm", "vllm-ascend", "torch", "torch-npu"):
        found = installed_version(name)
        needed = name == "vllm"
        if found is None:
            yield Check(
                name,
                Outcome.FAIL if needed else Outcome.NOTE,
                "not installed in this environment",
                "run this command with the Python that runs vLLM" if needed else "",
            )
        else:
            yield Check(name, Outcome.OK, found)
    yield Check("wrapt", Outcome.OK, metadata.version("wrapt"))


def _plugin() -> Iterator[Check]:
    points = metadata.entry_points(group=PLUGIN_GROUP)
    if any(point.name == PLUGIN for point in points):
        yield Check("vLLM plugin", Outcome.OK, f"entry point {PLUGIN!r} of {PLUGIN_GROUP} found")
    else:
        yield Check(
            "vLLM plugin",
            Outcome.FAIL,
            f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}",
            "install ascend-opt into this environment (a copy on PYTHONPATH has no entry points)",
        )
    allowed = filtered_out()
    if allowed is None:
        yield Check("VLLM_PLUGINS", Outcome.OK, "does not filter ascend_opt out")
    else:
        yield Check(
            "VLLM_PLUGINS",
            Outcome.FAIL,
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading ascend_opt",
            f"VLLM_PLUGINS={','.join(filter(None, [*allowed.split(','), PLUGIN]))}",
        )
    others = sorted({point.name for point in points} - {PLUGIN})
    if others:
        yield Check(
            "other plugins",
            Outcome.NOTE,
            f"may patch vLLM too: {', '.join(others)}",
        )


def _configuration() -> Check:
    value = os.environ.get(config.ENVIRONMENT)
    if not value:
        return Check(config.ENVIRONMENT, Outcome.NOTE, "not set: no pass is asked for")
    try:
        found = config.from_environment(value, registry.discover().classes())
    except AscendOptError as error:
        return Check(config.ENVIRONMENT, Outcome.FAIL, str(error), "all passes stay off until then")
    if found.off:
        return Check(config.ENVIRONMENT, Outcome.NOTE, "off: every pass is kept off")
    names = ", ".join(request.name for request in found.requests) or "no pass"
    return Check(config.ENVIRONMENT, Outcome.OK, f"asks for {names} (policy {found.policy})")


def _passes() -> Iterator[Check]:
    found = registry.discover()
    names = ", ".join(
        f"{name} ({provided.distribution})" for name, provided in sorted(found.passes.items())
    )
    yield Check("passes", Outcome.OK if names else Outcome.FAIL, names or "none found")
    for problem in found.problems:
        yield Check("pass left out", Outcome.FAIL, problem, "repair or uninstall it")
    for name, distributions in found.duplicates.items():
        yield Check(
            "pass name taken twice",
            Outcome.FAIL,
            f"{name} is provided by {' and '.join(distributions)}",
            "uninstall one of them",
        )


def _engines() -> Check:
    if installed_version("vllm") is None:
        return Check("engine watch", Outcome.NOTE, "no vLLM to look at")
    unmet = EngineWatch.unmet()
    if unmet is not None:
        return Check("engine watch", Outcome.FAIL, unmet, "this vLLM is too old or too new")
    return Check("engine watch", Outcome.OK, "engines can be checked before their model is built")


def _records() -> Check:
    directory = reporting.run_directory()
    try:
        reporting.make_private(directory)
        writable = os.access(directory, os.W_OK)
    except OSError as error:
        return Check(
            "run directory",
            Outcome.FAIL,
            f"{directory}: {error}",
            f"set {reporting.ENVIRONMENT} to a directory of yours; `status` is blind until then",
        )
    if not writable:
        return Check("run directory", Outcome.FAIL, f"{directory} cannot be written to")
    return Check("run directory", Outcome.OK, str(directory))
