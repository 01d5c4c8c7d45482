"""The `vllm.general_plugins` entry point: vLLM calls it in each of its processes."""

from __future__ import annotations

import logging
import os

from ascend_opt.errors import NotApplicableError

logger = logging.getLogger("vllm.ascend_opt")


def register() -> None:
    """Apply `VLLM_ASCEND_OPT` in this process; does nothing the second time.

    Raises:
        NotApplicableError: The configuration says `policy: strict` and a pass cannot apply. An
            exception here ends the process, which is what strict asks for; nothing else raises.
    """
    # The name is config.ENVIRONMENT, not imported: a process that no pass is asked for in does not
    # pay for the rest of this package.
    if not os.environ.get("VLLM_ASCEND_OPT", "").strip():
        return
    try:
        from ascend_opt import control, metrics
        from ascend_opt.states import State

        control.read_environment()
        if any(status.state is not State.OFF for status in control.status()):
            metrics.join_vllm()
    except NotApplicableError:
        raise
    except Exception:
        logger.exception("ascend_opt: passes stay off in this process")
