"""What a pass declares: the facts about it, its conditions, and its patches.

A pass is one class. Its patches are its methods, marked with the target that they replace:

    class Greeter(Pass):
        \"\"\"Say hello before every step.\"\"\"

        name = "greeter"
        origin = "example #1"
        remove_when = "the runner greets by itself"
        conditions = (Requires("vllm"),)

        @host_patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
                    known={"0123456789abcdef": "plain"})
        def execute_model(self, wrapped, runner, args, kwargs):
            self.counters["steps"] += 1
            return wrapped(*args, **kwargs)
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from ascend_opt.conditions import Condition
from ascend_opt.parameters import NoParameters
from ascend_opt.states import Mode
from ascend_opt.targets import Target

F = TypeVar("F", bound=Callable[..., Any])

BUILTIN = "builtin"
"""The variant of a source that already does what the pass would do."""

Shadow = Generator[None, Any, Sequence[str | None] | None]
"""What a shadow method is: see `shadow_of`."""


class Kind(StrEnum):
    """How a patch is put in place."""

    HOST = "host"
    TRACED = "traced"


@dataclass(frozen=True)
class Patch:
    """Our change to one target.

    Attributes:
        target: What is replaced.
        kind: `host` (a wrapt wrapper around eager code) or `traced` (a plain function in place
            of code that torch.compile sees, where a wrapper would be bypassed without an error).
        method: The name of the pass's method that does the work.
        known: Fingerprint of a recognised source, to the name of the variant it stands for.
        leave: Variants on which this target is left alone.
        optional: Whether the target may be missing (an older or newer design without it).
        redo: Whether a call that failed in our code, before the original has run, may be
            repeated with the original.
        shadow: The name of the pass's method that takes its place in shadow mode; None if in
            shadow mode this target is left alone.
    """

    target: Target
    kind: Kind
    method: str
    known: Mapping[str, str]
    leave: frozenset[str] = frozenset()
    optional: bool = False
    redo: bool = True
    shadow: str | None = None

    def applies_in(self, mode: Mode) -> bool:
        """Return whether the target is patched in a mode: in shadow, only if there is a shadow."""
        return mode is Mode.ACTIVE or self.shadow is not None


def host_patch(
    target: str,
    *,
    known: Mapping[str, str],
    leave: frozenset[str] = frozenset(),
    optional: bool = False,
    redo: bool = True,
) -> Callable[[F], F]:
    """Mark a method `(self, wrapped, instance, args, kwargs)` as the wrapper around a target.

    For eager code only: torch.compile silently bypasses wrapt wrappers. See `Patch` for the
    arguments. `wrapped` is the original, bound; if the wrapper fails after it has run, the caller
    gets its result. Set `redo=False` where the wrapper has effects that must not happen twice.
    """
    return _mark(Kind.HOST, target, known, leave, optional, redo)


def traced_patch(
    target: str,
    *,
    known: Mapping[str, str],
    leave: frozenset[str] = frozenset(),
    optional: bool = False,
) -> Callable[[F], F]:
    """Mark a method `(self, original) -> function` as the maker of a target's replacement.

    The function takes the target's place as a plain function, so torch.compile traces it like
    the original. Set `changes_graph = True` on the pass if it changes what is traced.
    """
    return _mark(Kind.TRACED, target, known, leave, optional, redo=False)


def shadow_of(*patched: Callable[..., Any]) -> Callable[[F], F]:
    """Mark a generator method `(self, instance, args, kwargs)` as what host patches do in shadow.

    In shadow mode the original does all the work, called by the framework alone, with the
    caller's arguments and for the caller's result. The method works out what the patch would have
    done, in memory of its own, up to its one `yield`; that gives what the original returned; then
    it compares, and returns what differs:

        @shadow_of(fill)
        def compare_fill(self, runner, args, kwargs):
            ours = self._filled(runner.lengths.copy(), *args, **kwargs)
            _result = yield
            return [difference("lengths", runner.lengths, ours)]

    It returns one entry for each thing compared: None where that is equal, else a line (see
    `difference`). Returning None, or ending before the `yield`, says that there was nothing to
    compare. The framework counts `compared` calls; the first line of a difference switches the
    pass off in this process, as does an exception. Patches without a shadow method are not
    applied in shadow mode, so a pass can shadow if one of its host patches has one.
    """
    marks = [getattr(method, "__ascend_opt_patch__", None) for method in patched]
    if not marks or not all(isinstance(m, Patch) and m.kind is Kind.HOST for m in marks):
        raise TypeError("shadow_of takes methods of this class that host_patch has marked")

    def mark(method: F) -> F:
        if not inspect.isgeneratorfunction(method):
            raise TypeError(f"{method.__qualname__} shadows a patch, so it has to be a generator")
        names = tuple(m.method for m in marks)  # type: ignore[union-attr]
        method.__ascend_opt_shadow_of__ = names  # type: ignore[attr-defined]
        return method

    return mark


def _mark(
    kind: Kind,
    target: str,
    known: Mapping[str, str],
    leave: frozenset[str],
    optional: bool,
    redo: bool,
) -> Callable[[F], F]:
    def mark(method: F) -> F:
        method.__ascend_opt_patch__ = Patch(  # type: ignore[attr-defined]
            Target.parse(target), kind, method.__name__, known, leave, optional, redo
        )
        return method

    return mark


class Pass:
    """One optimisation. Subclass it, fill in the facts, mark the methods that patch.

    Importing a pass must not import torch or vllm: do that inside the methods.

    Attributes:
        name: Kebab-case name that users write.
        version: Changes whenever what the pass does changes (it enters the compile-cache key).
        origin: Where the optimisation comes from, such as `vllm-ascend #2816`.
        remove_when: When this pass can be deleted.
        Parameters: Frozen dataclass of parameters, each with a default.
        conditions: When the pass applies, in the order in which they are checked.
        changes_graph: Whether the pass changes what torch.compile traces.
        effect: The counter that grows when the pass does its work; a proof that finds it at 0
            says that nothing was on.
        patches: Collected from the marked methods.
        parameters: This instance's resolved parameters.
        variants: Target to the recognised variant of its source, filled in before any patch.
        counters: What the pass did; `steps` and `held` (steps on which its conditions held) first.
    """

    name: ClassVar[str]
    version: ClassVar[str] = "1"
    origin: ClassVar[str]
    remove_when: ClassVar[str]
    Parameters: ClassVar[type] = NoParameters
    conditions: ClassVar[tuple[Condition, ...]] = ()
    changes_graph: ClassVar[bool] = False
    effect: ClassVar[str] = "steps"
    patches: ClassVar[tuple[Patch, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        shadows = {
            patched: name
            for name, marked in cls._marked("__ascend_opt_shadow_of__").items()
            for patched in marked
        }
        cls.patches = tuple(
            replace(patch, shadow=shadows.get(name))
            for name, patch in cls._marked("__ascend_opt_patch__").items()
        )

    @classmethod
    def _marked(cls, attribute: str) -> dict[str, Any]:
        """Return method name to the mark on it, in the order of definition.

        A subclass that overrides a marked method keeps its mark, unless it brings another.
        """
        names = {name: None for base in reversed(cls.__mro__) for name in vars(base)}
        found = {}
        for name in names:
            marks = (getattr(vars(base).get(name), attribute, None) for base in cls.__mro__)
            mark = next((mark for mark in marks if mark is not None), None)
            if mark is not None and callable(getattr(cls, name, None)):
                found[name] = mark
        return found

    def __init__(self, parameters: Any = None) -> None:
        self.parameters: Any = self.Parameters() if parameters is None else parameters
        self.variants: dict[str, str] = {}
        self.counters: Counter[str] = Counter()
        self.failure: str | None = None

    @classmethod
    def summary(cls) -> str:
        """Return what the pass does, in one line: the first line of its docstring."""
        return (cls.__doc__ or "").strip().split("\n", 1)[0]

    @classmethod
    def can_shadow(cls) -> bool:
        """Return whether the pass has a shadow mode: see `shadow_of`."""
        return any(patch.shadow for patch in cls.patches)

    def unmet(self) -> str | None:
        """Return why this instance, with these parameters, cannot work here; None if it can.

        Called once, before anything is patched, in the process that will run it. For what no
        condition can express, such as a device library without the function that is needed.
        """
        return None

    def applied(self) -> str:
        """Return one line on what the pass does here, given the recognised variants."""
        return ""

    def reverted(self) -> None:
        """Release what the pass holds (streams, buffers); called after its patches are out."""

    def fail(self, reason: str) -> None:
        """Switch this pass off in this process: from now on every target runs as if unpatched.

        Safe at run time, inside an op or a wrapper; the framework takes the patches out soon
        after and shows `failed` with the reason. Only the first reason is kept.
        """
        if self.failure is None:
            self.failure = reason
