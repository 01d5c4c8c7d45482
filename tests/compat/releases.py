"""Source of real vllm-ascend releases, fetched with pip and kept between runs.

Nothing is installed and nothing is built: pip downloads the source archive (its metadata step runs
the release's setup.py, which needs setuptools, setuptools_scm and wheel beside pip), and a few
Python files are unpacked into the user's cache directory.
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

RELEASES = (
    "0.18.0",
    "0.19.1rc1",
    "0.20.2rc1",
    "0.21.0rc1",
    "0.22.1rc1",
    "0.23.0",
    "0.23.0.post1",
    "0.24.0rc1",
    "0.25.1rc1",
    "0.26.0rc1",
    "0.27.1rc1",
    "0.28.0rc1",
    "0.29.0rc1",
    "0.30.0rc1",
    "0.30.0rc2",
)
DISTRIBUTION = "vllm-ascend"
_PACKAGE = "vllm_ascend"
_WANTED = (f"{_PACKAGE}/worker/", f"{_PACKAGE}/_310p/worker/", f"{_PACKAGE}/__init__.py")


class SourceUnavailableError(RuntimeError):
    """A release could neither be found in the cache nor be downloaded."""


def cache_directory() -> Path:
    """Return where sources are kept: `$XDG_CACHE_HOME/ascend-opt/sources`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ascend-opt" / "sources"


@cache
def source(version: str) -> Path:
    """Return a directory that holds the release's `vllm_ascend` package (its Python workers only).

    Raises:
        SourceUnavailableError: pip could not get the release; says what pip said.
    """
    target = cache_directory() / f"{DISTRIBUTION}-{version}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            unpacked = Path(scratch) / "source"
            _unpack(_download(version, Path(scratch)), unpacked)
            try:
                unpacked.rename(target)
            except OSError:  # another process was faster
                if not target.is_dir():
                    raise
    return target


def module_file(version: str, module: str) -> Path:
    """Return the file of a module of a release."""
    return source(version).joinpath(*module.split(".")).with_suffix(".py")


def _download(version: str, directory: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--no-binary", DISTRIBUTION, "--dest", str(directory), f"{DISTRIBUTION}=={version}"),
    ]
    # What the releases' setup.py asks for, so that it looks for no device.
    environment = os.environ | {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    archives = list(directory.glob("*.tar.gz"))
    if done.returncode or not archives:
        said = done.stderr.strip().splitlines()[-3:]
        raise SourceUnavailableError(
            f"could not download {DISTRIBUTION}=={version} with pip (needs a package registry, "
            f"and setuptools, setuptools_scm and wheel in {sys.prefix}); pip said: "
            + " | ".join(said or ["nothing"])
        )
    return archives[0]


def _unpack(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, name = member.name.partition("/")
            if not (member.isfile() and name.endswith(".py") and name.startswith(_WANTED)):
                continue
            content = tar.extractfile(member)
            assert content is not None
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)
