"""The `vllm.general_plugins` entry point: vLLM calls it in each of its processes."""

from __future__ import annotations

import logging
import os
import sys

from ascend_opt.errors import NotApplicableError

logger = logging.getLogger("vllm.ascend_opt")

# `ENVIRONMENT` of config, reporting and bisect_limit, not imported: a process that no pass is asked
# for in does not pay for the rest of this package.
VARIABLES = ("VLLM_ASCEND_OPT", "VLLM_ASCEND_OPT_RUN_DIR", "VLLM_ASCEND_OPT_BISECT_LIMIT")


def register() -> None:
    """Apply `VLLM_ASCEND_OPT` in this process; does nothing the second time.

    Raises:
        NotApplicableError: The configuration says `policy: strict` and a pass cannot apply. An
            exception here ends the process, which is what strict asks for; nothing else raises.
    """
    try:
        _declare([name for name in VARIABLES if name in os.environ])
        if not os.environ.get(VARIABLES[0], "").strip():
            return
        from ascend_opt import control, metrics
        from ascend_opt.states import State

        control.read_environment()
        if any(status.state is not State.OFF for status in control.status()):
            metrics.join_vllm()
    except NotApplicableError:
        raise
    except Exception:
        logger.exception("ascend_opt: passes stay off in this process")


def _declare(names: list[str]) -> None:
    """Make variables known to vLLM.

    It warns of those that it does not know, and with `--fail-on-environ-validation` refuses to
    start. It also hashes them for its compile cache: their values say nothing there, since what
    passes do to a graph enters through `compile_key`.
    """
    envs = sys.modules.get("vllm.envs")  # there, since vLLM asks it which plugins to call
    known = getattr(envs, "environment_variables", None)
    if isinstance(known, dict):
        for name in names:
            known.setdefault(name, lambda: None)
