"""The vllm-ascend releases of the table, and their modules."""

from __future__ import annotations

from pathlib import Path

from ascend_opt.compat.sources import fetch
from compat.table import read

RELEASES = tuple(read()["releases"]["vllm-ascend"])


def source(version: str) -> Path:
    """Return a directory that holds a release's `vllm_ascend` package (its Python files only)."""
    return fetch("vllm-ascend", version)


def module_file(version: str, module: str) -> Path:
    """Return the file of a module of a release."""
    return source(version).joinpath(*module.split(".")).with_suffix(".py")
