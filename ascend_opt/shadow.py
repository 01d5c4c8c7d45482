"""Shadow mode: the original does the work, and what the pass would have done is compared with it.

An operator tries a pass on production traffic this way. Whatever happens in the pass, the engine
goes on with the original's values; on the first difference the pass is off in that process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ascend_opt.base import Pass, Patch, Shadow

logger = logging.getLogger("vllm.ascend_opt")

COMPARED = "compared"
"""The counter of calls whose outcome was compared."""

DIFFERED = "differed"
"""The counter of comparisons that found a difference: 0 or 1, since the pass goes off then."""

MAX_SHOWN = 8
MAX_LABEL = 80


def shadowing(
    instance: Pass, patch: Patch, method: Callable[..., Shadow]
) -> Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Return the wrapper that a host target gets in shadow mode; see `base.shadow_of`."""

    def off(reason: str) -> None:
        try:
            instance.fail(reason)
        except Exception:
            logger.exception("ascend_opt: %s: its own fail() failed", instance.name)
            Pass.fail(instance, reason)

    def failed(error: Exception) -> None:
        off(f"{patch.target}, in shadow: {type(error).__name__}: {error}")
        logger.exception(
            "ascend_opt: pass %s failed in shadow mode at %s and is now off in this process; "
            "the engine goes on with the original",
            instance.name,
            patch.target,
        )

    def begin(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shadow | None:
        try:
            comparison = method(target, args, kwargs)
            next(comparison)
        except StopIteration:
            return None
        except Exception as error:
            failed(error)
            return None
        return comparison

    def finish(comparison: Shadow, result: Any) -> None:
        try:
            comparison.send(result)
        except StopIteration as end:
            if end.value is None or instance.failure is not None:
                return  # nothing to compare, or switched off meanwhile
            instance.counters[COMPARED] += 1
            lines = [line for line in end.value if line is not None]
            if not lines:
                return
            instance.counters[DIFFERED] += 1
            found = "; ".join(lines)
            logger.error(
                "ascend_opt: %s, in shadow mode, differs from the original at %s and is now off in "
                "this process; the engine goes on with the original's values. %s",
                instance.name,
                patch.target,
                found,
            )
            off(f"in shadow, it differs from the original: {found}")
        else:
            raise RuntimeError(f"{method.__qualname__} yields more than once")

    def guard(wrapped: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        comparison = None if instance.failure is not None else begin(target, args, kwargs)
        result = wrapped(*args, **kwargs)
        if comparison is not None:
            try:
                finish(comparison, result)
            except Exception as error:
                failed(error)
        return result

    return guard


def difference(
    what: str, expected: Any, found: Any, label: Callable[[int], str] | None = None
) -> str | None:
    """Return None where two arrays are equal, else a line that says where they are not.

    Args:
        what: What they hold, such as `seq_lens`.
        expected: What the original wrote: anything that `numpy.asarray` takes, such as an array or
            a tensor on the CPU. NaNs are equal to each other.
        found: What the pass would have written; same shape and type.
        label: Names a row, such as by its request's id; None for row numbers alone.

    Returns:
        One line of bounded length: the rows with their labels, expected and found values.
    """
    import numpy as np

    expected, found = np.asarray(expected), np.asarray(found)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return (
            f"{what}: expected {expected.dtype} of shape {list(expected.shape)}, "
            f"found {found.dtype} of shape {list(found.shape)}"
        )
    apart = expected != found
    if expected.dtype.kind in "fc":
        apart &= ~(np.isnan(expected) & np.isnan(found))
    places = np.argwhere(apart)
    if not len(places):
        return None
    shown = [
        f"{_name(place, label)}expected {expected[tuple(place)]}, found {found[tuple(place)]}"
        for place in places[:MAX_SHOWN]
    ]
    if len(places) > len(shown):
        shown.append(f"and {len(places) - len(shown)} more")
    return f"{what} ({len(places)} of {apart.size} values): {'; '.join(shown)}"


def _name(place: Sequence[int], label: Callable[[int], str] | None) -> str:
    """Return what stands before the values of one place: the row's label and the indices."""
    if not len(place):
        return ""
    where = f"[{', '.join(map(str, place))}] "
    if label is None:
        return where
    name = label(int(place[0]))
    return f"{name if len(name) <= MAX_LABEL else name[:MAX_LABEL] + '…'} {where}"
