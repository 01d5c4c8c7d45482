"""Applying and reverting patches: all of a pass or none of it, never someone else's.

A *host* patch is a wrapt wrapper, so it can be spliced out even under wrappers that others put on
top later. A *traced* patch is a plain function in the target's place, because torch.compile
bypasses wrapt wrappers without an error; it comes out only while it is outermost.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from ascend_opt.base import BUILTIN, Kind, Pass, Patch
from ascend_opt.errors import ConflictError, PatchError, RevertError
from ascend_opt.recognition import Recognition
from ascend_opt.shadow import shadowing
from ascend_opt.states import Mode
from ascend_opt.targets import innermost, layers, reaches, source_of, whence

logger = logging.getLogger("vllm.ascend_opt")


@dataclass(frozen=True)
class Applied:
    """A patch in place.

    Attributes:
        patch: What was applied.
        owner: The class or module that holds the target.
        attribute: The target's name in it.
        original: The object that was there, exactly (a staticmethod stays one).
        installed: The object that we put there.
        stale: Names elsewhere that still hold the original (`from x import y` done earlier).
    """

    patch: Patch
    owner: Any
    attribute: str
    original: Any
    installed: Any
    stale: tuple[str, ...] = ()

    def replaced_by(self) -> str | None:
        """Return None while our patch is in place, else who stands there instead."""
        current = vars(self.owner).get(self.attribute)
        if reaches(current, self.installed):
            return None
        return "nothing" if current is None else whence(current)

    def covered_by(self) -> str | None:
        """Return who put something on top that would be lost by reverting; None if nobody."""
        layer = vars(self.owner).get(self.attribute)
        if not reaches(layer, self.installed):
            return None  # replaced wholesale: nothing of ours is left
        while layer is not self.installed:
            # wrapt splices our wrapper out from under its own kind, and from nothing else.
            if self.patch.kind is Kind.TRACED or not isinstance(layer, wrapt.FunctionWrapper):
                return whence(layer)
            layer = layer.__wrapped__
        return None

    def revert(self) -> None:
        """Give the original object back.

        Raises:
            RevertError: Someone else's replacement is on top and would be lost.
        """
        other = self.covered_by()
        if other is not None:
            raise RevertError(
                f"{self.patch.target} cannot be reverted, since {other} was put on top of it "
                "later; remove that first, then disable again"
            )
        if self.patch.kind is Kind.HOST:
            # What our wrapper wraps now: another pass that it wrapped may be gone by this time.
            wrapt.unwrap_object(self.owner, self.attribute, self.installed, missing_ok=True)
        elif vars(self.owner).get(self.attribute) is self.installed:
            setattr(self.owner, self.attribute, self.original)


class _HostWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapper of ours: host patches of several passes on one target wrap one another."""


def check_live(recognition: Recognition, module: ModuleType) -> tuple[Any, str, str | None]:
    """Make sure that what is imported is what was recognised on disk.

    Returns:
        The owner of the target, the target's name in it, and the variant that is live: another
        function than the one on disk may have taken its place, if its own source is known.

    Raises:
        ConflictError: Someone else has patched the target.
        PatchError: The target is missing.
    """
    patch, expected = recognition.patch, recognition.source
    owner: Any = module
    *path, attribute = patch.target.qualname.split(".")
    for name in path:
        owner = getattr(owner, name, None)
    if owner is None or attribute not in vars(owner):
        raise PatchError(f"{patch.target} is in the source but not in the imported module")

    live = vars(owner)[attribute]
    while patch.kind is Kind.HOST and type(live) is _HostWrapper:
        live = live.__wrapped__
    source = source_of(live)
    if source is None or _wrappers(live) > source.decorators:
        raise ConflictError(f"{patch.target} is already patched by {whence(live)}")
    if expected is not None and source.fingerprint == expected.fingerprint:
        return owner, attribute, recognition.variant
    variant = patch.known.get(source.fingerprint)
    if variant is None or variant == BUILTIN or variant in patch.leave:
        raise ConflictError(
            f"{patch.target} was replaced by {whence(live)} "
            f"({f'variant {variant!r}' if variant else f'sha {source.fingerprint}, unknown'})"
        )
    return owner, attribute, variant


def _wrappers(function: Any) -> int:
    """Return how many wrappers lie around a function (its own decorators' included)."""
    around = layers(function)[:-1]
    return sum(not issubclass(type(layer), staticmethod | classmethod) for layer in around)


def apply(
    instance: Pass, recognition: Recognition, module: ModuleType, mode: Mode = Mode.ACTIVE
) -> Applied:
    """Put one patch in place; nothing is changed if this raises.

    Args:
        instance: The pass, with its parameters and variants.
        recognition: The patch and its source.
        module: The imported module of the target.
        mode: In shadow mode the patch's shadow method takes the place of its method.

    Raises:
        PatchError: See `check_live`; also if the pass's own method fails.
    """
    patch = recognition.patch
    owner, attribute, variant = check_live(recognition, module)
    if variant is not None:
        instance.variants[str(patch.target)] = variant
    original = vars(owner)[attribute]
    shadow = patch.shadow if mode is Mode.SHADOW else None
    method = getattr(instance, shadow or patch.method)
    stale = _stale_bindings(original, module) if owner is module else ()
    if patch.kind is Kind.HOST:
        guard = (shadowing if shadow else _guarded)(instance, patch, method)
        # So that a message about who patched a target names the pass.
        guard.__module__, guard.__qualname__ = method.__module__, method.__qualname__
        installed = wrapt.wrap_object(owner, attribute, _HostWrapper, (guard,))
    else:
        installed = _replacement(patch, method, original)
        wrapt.apply_patch(owner, attribute, installed)
    return Applied(patch, owner, attribute, original, installed, stale)


def _replacement(patch: Patch, method: Callable[[Any], Any], original: Any) -> Any:
    inner = innermost(original) if isinstance(original, staticmethod | classmethod) else original
    try:
        function = method(inner)
    except Exception as error:
        raise PatchError(
            f"{patch.target}: the pass could not make its function: {error}"
        ) from error
    if not isinstance(function, FunctionType):
        raise PatchError(
            f"{patch.target}: the pass made {type(function).__name__}, expected a plain function "
            "(torch.compile bypasses anything else)"
        )
    if not hasattr(function, "__wrapped__"):
        functools.update_wrapper(function, inner)
    if isinstance(original, staticmethod | classmethod):
        return type(original)(function)
    return function


def _guarded(instance: Pass, patch: Patch, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a host method so that an error of ours switches the pass off, not the engine."""

    def guard(wrapped: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if instance.failure is not None:
            return wrapped(*args, **kwargs)
        results: list[Any] = []
        errors: list[BaseException] = []

        def original(*args: Any, **kwargs: Any) -> Any:
            try:
                result = wrapped(*args, **kwargs)
            except BaseException as error:
                errors.append(error)
                raise
            results.append(result)
            return result

        try:
            return method(original, target, args, kwargs)
        except Exception as error:
            if any(error is own for own in errors):
                raise
            if isinstance(error, TypeError) and not _accepts(wrapped, args, kwargs):
                raise  # the caller's mistake
            reason = f"{patch.target}: {type(error).__name__}: {error}"
            try:
                instance.fail(reason)
            except Exception as second:
                # What the original relies on may not be there: it cannot take over.
                Pass.fail(instance, reason)
                second.add_note(_note(instance, patch, "while it switched itself off"))
                raise
            again = patch.redo and not results
            logger.exception(
                "ascend_opt: pass %s failed in %s and is now off in this process%s",
                instance.name,
                patch.target,
                "; the call is repeated with the original" if again else "",
            )
            if results:
                return results[-1]  # the original has run, and must not run twice
            if again:
                return wrapped(*args, **kwargs)
            error.add_note(_note(instance, patch))
            raise

    return guard


def _note(instance: Pass, patch: Patch, when: str = "") -> str:
    return " ".join(
        filter(None, (f"raised by ascend_opt pass {instance.name!r} in {patch.target}", when))
    )


def _accepts(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(wrapped).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # no signature to be had
        return True
    return True


def _stale_bindings(original: Any, module: ModuleType) -> tuple[str, ...]:
    """Name the modules that took a function with `from x import y` before it was patched."""
    found = []
    for name, other in list(sys.modules.items()):
        if other is module or not isinstance(other, ModuleType):
            continue
        found += [f"{name}.{key}" for key, value in list(vars(other).items()) if value is original]
    return tuple(sorted(found))
