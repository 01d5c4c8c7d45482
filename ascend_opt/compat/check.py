"""What the passes recognise of what is installed, whatever its version string says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from packaging.version import InvalidVersion, Version

from ascend_opt import registry
from ascend_opt.base import Pass, Patch
from ascend_opt.compat import sources
from ascend_opt.compat.nearest import Nearest, nearest
from ascend_opt.conditions import installed_version
from ascend_opt.recognition import Action, Recognition, judge, recognise_all
from ascend_opt.states import State, TargetReport
from ascend_opt.targets import Source, package_directories

COMPARED = 3
"""Releases that an unknown source is compared with: the nearest by version."""

Notify = Callable[[str], None]


@dataclass(frozen=True)
class PassCheck:
    """What a pass recognises here.

    Attributes:
        name: The pass.
        state: `armed` if it can be on with these sources, else `builtin` or `inapplicable`.
        reason: Why it cannot be on.
        targets: What stands at each target.
        changed: Targets, in a package that is installed, that are unknown or missing.
        nearest: Unknown target to the known source most similar to it, where that was asked for.
    """

    name: str
    state: State
    reason: str
    targets: tuple[TargetReport, ...]
    changed: tuple[str, ...]
    nearest: dict[str, Nearest]


@dataclass(frozen=True)
class Report:
    """What is installed, and what each pass recognises of it.

    Attributes:
        versions: Distribution that some pass patches to its installed version, or None.
        passes: One for each registered pass.
    """

    versions: dict[str, str | None]
    passes: tuple[PassCheck, ...]

    @property
    def sound(self) -> bool:
        """Whether something is installed to look at, and every target in it is recognised."""
        return any(self.versions.values()) and not any(p.changed for p in self.passes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"sound": self.sound}


def check(fetch: bool = False, notify: Notify = lambda line: None) -> Report:
    """Recognise every target of every registered pass; imports nothing of what it looks at.

    Args:
        fetch: Show unknown sources beside the nearest known one, from releases got with pip.
        notify: Told what is being fetched, and what could not be.
    """
    classes = registry.discover().classes()
    packages = sorted(
        {sources.distribution_of(p.target) for c in classes.values() for p in c.patches}
    )
    installed = {name: installed_version(name) for name in packages}
    found = tuple(_check(cls, installed, fetch, notify) for cls in classes.values())
    return Report(installed, found)


def _check(
    cls: type[Pass], installed: dict[str, str | None], fetch: bool, notify: Notify
) -> PassCheck:
    found = recognise_all(cls)
    verdict = judge(found, allow_unknown=False)
    compared = {}
    if fetch:
        for item in found:
            if item.action is Action.UNKNOWN and item.source is not None:
                known = _nearest(item.patch, item.source, installed, notify)
                if known is not None:
                    compared[str(item.patch.target)] = known
    return PassCheck(
        name=cls.name,
        state=verdict.state,
        reason=verdict.reason,
        targets=tuple(item.report() for item in found),
        changed=tuple(str(item.patch.target) for item in found if _changed(item)),
        nearest=compared,
    )


def _changed(item: Recognition) -> bool:
    if item.action is Action.MISSING:
        return bool(package_directories(item.patch.target.module.partition(".")[0]))
    return item.action is Action.UNKNOWN


def _nearest(
    patch: Patch, source: Source, installed: dict[str, str | None], notify: Notify
) -> Nearest | None:
    distribution = sources.distribution_of(patch.target)

    def released() -> Iterator[tuple[str, Source]]:
        near = by_nearness(sources.versions(distribution), installed[distribution])
        for version in islice(near, COMPARED):
            notify(f"reading {distribution} {version}")
            found = sources.locate_in(sources.fetch(distribution, version), patch.target)
            if found is not None:
                yield f"{distribution} {version}", found

    try:
        found = nearest(patch, source, released())
    except sources.SourceUnavailableError as error:
        notify(f"nothing to compare {patch.target} with: {error}")
        return None
    if found is None:
        notify(f"{patch.target}: the {COMPARED} nearest releases hold no source that is known")
    return found


def by_nearness(versions: list[str], version: str | None) -> list[str]:
    """Order releases, newest first, by nearness: downwards from a version, then upwards from it.

    A version that says nothing (a nightly's may not) leaves the newest first.
    """
    try:
        here = Version(version or "")
    except InvalidVersion:
        return versions
    if here == Version("0"):  # installed without metadata
        return versions
    older = [v for v in versions if Version(v) <= here]
    return older + [v for v in reversed(versions) if Version(v) > here]
