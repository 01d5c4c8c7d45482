"""`VLLM_ASCEND_OPT_BISECT_LIMIT=n`: only the first n patches are applied, in every process.

Patches are numbered from 1 in the order of the configuration and, within a pass, of its class.
Halving n finds the patch that is wrong on a live server, as LLVM's `-opt-bisect-limit` does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

logger = logging.getLogger("vllm.ascend_opt")

ENVIRONMENT = "VLLM_ASCEND_OPT_BISECT_LIMIT"


class BisectLimit:
    """Numbers the patches of a process, and prints each with what becomes of it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}

    def left_out(self, name: str, targets: Iterable[str]) -> frozenset[str]:
        """Return those of a pass's targets that are beyond the limit; none without a limit."""
        limit = _limit()
        if limit is None:
            return frozenset()
        beyond = set()
        for target in targets:
            number = self._numbers.setdefault((name, target), len(self._numbers) + 1)
            if number > limit:
                beyond.add(target)
            logger.warning(
                "ascend_opt: bisect: patch %d, %s, %s: %s",
                number,
                name,
                target,
                f"left out (limit {limit})" if number > limit else "to be applied",
            )
        return frozenset(beyond)


def _limit() -> int | None:
    value = os.environ.get(ENVIRONMENT, "").strip()
    if not value:
        return None
    if value.isdecimal():
        return int(value)
    logger.warning(
        "ascend_opt: %s=%r: expected a number of patches; none is left out", ENVIRONMENT, value
    )
    return None
