"""The hook specifications: what a distribution with passes implements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from ascend_opt.base import Pass

PROJECT = "ascend_opt"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def ascend_opt_passes() -> Iterable[type[Pass]]:  # type: ignore[empty-body]
    """Return the pass classes of this plugin.

    Must be quick and import neither torch nor vllm: it runs in every vLLM process, enabled
    passes or not.
    """
