"""Python source of released packages, fetched with pip and kept between runs.

Nothing is installed, nothing is built, and no code of the release runs: pip downloads the source
archive and takes its metadata from the build backend below, which stands in for the release's own
and copies PKG-INFO. The package's Python files are then unpacked into the user's cache directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

from packaging.version import Version

from ascend_opt.errors import AscendOptError
from ascend_opt.targets import Source, Target, source_in

_BACKEND = """
import pathlib, re

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    text = pathlib.Path("PKG-INFO").read_text(encoding="utf-8")
    name, version = (re.search(rf"^{key}: *(\\S+)", text, re.M)[1] for key in ("Name", "Version"))
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    pathlib.Path(directory, info).mkdir()
    pathlib.Path(directory, info, "METADATA").write_text(text, encoding="utf-8")
    return info
"""


class SourceUnavailableError(AscendOptError):
    """A release could neither be found in the cache nor be downloaded."""


def distribution_of(target: Target) -> str:
    """Return the distribution whose releases hold a target: `vllm` or `vllm-ascend`, say."""
    return target.module.partition(".")[0].replace("_", "-")


def cache_directory() -> Path:
    """Return where sources are kept: `$XDG_CACHE_HOME/ascend-opt/releases`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ascend-opt" / "releases"


@cache
def fetch(distribution: str, version: str) -> Path:
    """Return a directory that holds the release's package (its Python files only).

    Raises:
        SourceUnavailableError: pip could not get the release; says what pip said.
    """
    target = cache_directory() / f"{distribution}-{version}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            unpacked = Path(scratch) / "source"
            _unpack(_download(distribution, version, Path(scratch)), distribution, unpacked)
            try:
                unpacked.rename(target)
            except OSError:  # another process was faster
                if not target.is_dir():
                    raise
    return target


def versions(distribution: str) -> list[str]:
    """Return the releases that the registry has, pre-releases included, newest first.

    Raises:
        SourceUnavailableError: pip could not list them; says what pip said.
    """
    said = _pip("index", "versions", "--pre", distribution)
    listed = next((x for x in said.splitlines() if x.startswith("Available versions:")), "")
    found = [text.strip() for text in listed.partition(":")[2].split(",") if text.strip()]
    if not found:
        raise SourceUnavailableError(f"pip lists no release of {distribution}; it said: {said}")
    return sorted(found, key=Version, reverse=True)


def locate_in(root: Path, target: Target) -> Source | None:
    """Return the source of a target under a directory of packages, or None."""
    base = root.joinpath(*target.module.split("."))
    for file in (base / "__init__.py", base.with_suffix(".py")):
        if file.is_file():
            return source_in(file, target.qualname)
    return None


def _download(distribution: str, version: str, directory: Path) -> Path:
    backend = directory / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND)
    _pip(
        *("download", "--quiet", "--no-deps", "--no-build-isolation", "--use-pep517"),
        *("--no-binary", ":all:", "--dest", str(directory), f"{distribution}=={version}"),
        path=backend.parent,
    )
    (archive,) = directory.glob("*.tar.gz")
    return archive


def _pip(*arguments: str, path: Path | None = None) -> str:
    """Run pip, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | ({"PYTHONPATH": str(path)} if path else {}),
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = [line for line in lines if not line.startswith("WARNING")][-3:]
        raise SourceUnavailableError(
            f"pip {arguments[0]} {arguments[-1]} failed (it needs a package registry, and pip in "
            f"{sys.prefix}); pip said: " + " | ".join(said or ["nothing"])
        )
    return done.stdout


def _unpack(archive: Path, distribution: str, target: Path) -> None:
    package = distribution.replace("-", "_")
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, name = member.name.partition("/")
            inside = name.startswith(f"{package}/") and ".." not in Path(name).parts
            if not (member.isfile() and name.endswith(".py") and inside):
                continue
            content = tar.extractfile(member)
            assert content is not None
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)
