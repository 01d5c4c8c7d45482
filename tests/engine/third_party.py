"""A third party's distribution with passes, as pip would have installed it."""

import textwrap
from pathlib import Path

from ascend_opt.targets import Target, locate


def fingerprint_of(target: str) -> str:
    source = locate(Target.parse(target))
    assert source is not None
    return source.fingerprint


def install(directory: Path, name: str, text: str) -> None:
    """Write a module with an entry point of its own into a directory for PYTHONPATH."""
    (directory / f"{name}.py").write_text(textwrap.dedent(text))
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[ascend_opt.passes]\n{name} = {name}\n")
