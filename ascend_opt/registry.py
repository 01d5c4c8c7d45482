"""Discovery of passes: pluggy plugins from the entry-point group `ascend_opt.passes`.

Entry points are loaded one at a time (`load_setuptools_entrypoints` dies on the first broken
distribution): what fails is reported by name and skipped.
"""

from __future__ import annotations

import configparser
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import cast

import pluggy

from ascend_opt import hookspecs
from ascend_opt.base import Pass
from ascend_opt.config import OPTIONS
from ascend_opt.errors import DuplicatePassError, UnknownPassError, nearest

logger = logging.getLogger("vllm.ascend_opt")

GROUP = "ascend_opt.passes"


@dataclass(frozen=True)
class EntryPoint:
    """One line of a distribution's `ascend_opt.passes` group."""

    distribution: str
    version: str
    name: str
    value: str


@dataclass(frozen=True)
class Provided:
    """A pass class and the distribution that it came from."""

    cls: type[Pass]
    distribution: str


@dataclass
class Registry:
    """What was found.

    Attributes:
        passes: Name to pass.
        problems: One line for each entry point or pass that was left out.
        duplicates: Name to the distributions that both provide it; such a pass cannot be used.
    """

    passes: dict[str, Provided] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    duplicates: dict[str, list[str]] = field(default_factory=dict)

    def get(self, name: str) -> Provided:
        """Return the pass of that name.

        Raises:
            DuplicatePassError: Two distributions provide it.
            UnknownPassError: None does.
        """
        if name in self.duplicates:
            raise DuplicatePassError(
                f"pass {name!r} is provided by {' and '.join(self.duplicates[name])}; "
                "uninstall one of them"
            )
        if name not in self.passes:
            raise UnknownPassError(f"no pass {name!r}; {nearest(name, self.passes)}")
        return self.passes[name]

    def classes(self) -> Mapping[str, type[Pass]]:
        """Return name to class, of the passes that can be used."""
        return {name: provided.cls for name, provided in sorted(self.passes.items())}

    def add(self, distribution: str, classes: Iterable[type[Pass]]) -> None:
        """Take in the passes of one distribution; what is not a valid pass becomes a problem."""
        for cls in classes:
            if (flaw := _flaw(cls)) is not None:
                self.problems.append(f"{distribution}: {flaw}")
                continue
            other = self.passes.get(cls.name)
            if cls.name in self.duplicates:
                self.duplicates[cls.name].append(distribution)
            elif other is not None and other.cls is not cls:
                self.duplicates[cls.name] = [other.distribution, distribution]
                del self.passes[cls.name]
                self.problems.append(
                    f"pass {cls.name!r} is provided by {other.distribution} and {distribution}; "
                    "uninstall one of them"
                )
            else:
                self.passes[cls.name] = Provided(cls, distribution)


def _flaw(cls: object) -> str | None:
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        return f"{cls!r} is not a subclass of ascend_opt.Pass"
    facts = ("name", "origin", "remove_when", "version")
    missing = [fact for fact in facts if not isinstance(getattr(cls, fact, None), str)]
    if missing or not cls.summary():
        return f"pass class {cls.__qualname__} has no {', '.join(missing or ['docstring'])}"
    targets = Counter(str(patch.target) for patch in cls.patches)
    twice = [target for target, count in targets.items() if count > 1]
    if twice:
        return f"pass {cls.name!r} patches {', '.join(twice)} more than once"
    if not dataclasses.is_dataclass(cls.Parameters):
        return f"pass {cls.name!r}: Parameters is no dataclass"
    fields = dataclasses.fields(cls.Parameters)
    if any(
        f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        for f in fields
    ):
        return f"pass {cls.name!r}: a parameter has no default"
    if taken := {f.name for f in fields} & set(OPTIONS):
        return f"pass {cls.name!r}: the framework has an option of its own named {taken.pop()!r}"
    return None


def entry_points() -> list[EntryPoint]:
    """Return the entry points of all installed distributions, each distribution once.

    Reads just the files named entry_points.txt: `importlib.metadata.entry_points` also parses
    every distribution's metadata, which takes 40 ms in a usual vLLM environment.
    """
    found: dict[tuple[str, str], EntryPoint] = {}
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
            if text is None or GROUP not in text:
                continue
            parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
            parser.optionxform = str  # type: ignore[assignment, method-assign]
            parser.read_string(text)
            if not parser.has_section(GROUP):
                continue
            name, version = distribution.metadata["Name"], distribution.version
            for key, value in parser.items(GROUP):
                # The first on sys.path is the one that Python imports.
                found.setdefault((name, key), EntryPoint(name, version, key, value))
        except Exception as error:  # one broken distribution is no reason to lose the others
            where = getattr(distribution, "_path", distribution)
            logger.warning("ascend_opt: left out: %s: metadata cannot be read: %s", where, error)
    return list(found.values())


@cache
def discover() -> Registry:
    """Load all plugins and collect their passes, once for each process."""
    return load(entry_points())


def _load(value: str) -> object:
    """Return what an entry point names: a module, or `module:attribute`."""
    return metadata.EntryPoint("", value, GROUP).load()


def load(
    points: Iterable[EntryPoint],
    importer: Callable[[str], object] = _load,
) -> Registry:
    """Load plugins one by one; see `Registry` for what becomes of the broken ones."""
    registry = Registry()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for point in points:
        name = f"{point.distribution}:{point.value}"
        try:
            plugin = importer(point.value)
            if manager.is_registered(plugin):
                continue  # two names for one module
            manager.register(plugin, name)
            manager.check_pending()  # a misspelt hook is accepted until then
            found = [
                i for i in manager.hook.ascend_opt_passes.get_hookimpls() if i.plugin is plugin
            ]
            if not found:
                raise LookupError(f"{point.value} implements no hook 'ascend_opt_passes'")
            classes = list(cast(Iterable[type[Pass]], found[0].function()))
            registry.add(point.distribution, classes)
        except (Exception, SystemExit) as error:
            if manager.has_plugin(name):  # a register() that failed leaves it half registered
                manager.unregister(name=name)
            registry.problems.append(
                f"{point.distribution} {point.version}, entry point {point.name!r}: "
                f"{type(error).__name__}: {error}"
            )
    for problem in registry.problems:
        logger.warning("ascend_opt: left out: %s", problem)
    return registry
