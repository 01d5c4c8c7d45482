"""Reads the operator schemas of vllm-ascend's compiled extension, which is not built here.

They are vllm-ascend's text, so they are read from its own distribution at set-up and kept in the
cache only: from the strings of the installed ``vllm_ascend_C*.so`` where a wheel is installed, and
otherwise from the C++ source in the source archive, which pip fetches.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_SCHEMA = re.compile(r"[a-z_]\w*(\.\w+)?\s*\(.*\)\s*->.*")
_DEFINITION = re.compile(r'ops\.def\(\s*((?:R?"(?:\\.|[^"\\])*"\s*)+)')
_LITERAL = re.compile(r'"((?:\\.|[^"\\])*)"')


class SchemaError(RuntimeError):
    """The operator schemas could not be found; the message says where they were looked for."""


def from_binary(data: bytes) -> list[str]:
    """Return the schemas among the printable strings of a shared library."""
    strings = (run.decode("ascii").strip() for run in re.findall(rb"[\x20-\x7e]{6,}", data))
    return list(dict.fromkeys(s for s in strings if _SCHEMA.fullmatch(s)))


def from_source(text: str) -> list[str]:
    """Return the schemas that C++ source passes to ``ops.def``."""
    schemas = []
    for definition in _DEFINITION.finditer(text):
        schema = "".join(_LITERAL.findall(definition.group(1)))
        schema = schema.replace('\\"', '"').replace("\\n", " ")
        if schema.startswith("(") and schema.endswith(")"):  # a raw string's own parentheses
            schema = schema[1:-1]
        schema = " ".join(schema.split())
        if "->" in schema:
            schemas.append(schema)
    return list(dict.fromkeys(schemas))


def find_schemas(package: Path, version: str) -> list[str]:
    """Return the schemas of one vllm-ascend.

    Args:
        package: The installed package's directory.
        version: Its version, to fetch the source of where there is no compiled extension.

    Raises:
        SchemaError: If neither gives any.
    """
    binaries = sorted(package.glob("vllm_ascend_C*.so"))
    if binaries:
        schemas = from_binary(binaries[0].read_bytes())
        looked_in = str(binaries[0])
    else:
        with tempfile.TemporaryDirectory() as directory:
            archive = _fetch_source(version, Path(directory))
            looked_in = f"csrc/torch_binding.cpp of {archive.name}"
            schemas = from_source(_read_member(archive, "csrc/torch_binding.cpp"))
    if not schemas:
        raise SchemaError(
            f"no operator schema in {looked_in}, where vllm-ascend {version} should have some; "
            f"this release registers its operators in a way that simnpu does not know"
        )
    return schemas


def _fetch_source(version: str, directory: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
    ]
    command += ["--no-build-isolation", "--dest", str(directory), f"vllm-ascend=={version}"]
    environment = {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    archives = sorted(directory.glob("vllm_ascend-*.tar.gz"))
    if not archives:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SchemaError(
            f"vllm-ascend {version} is installed without its compiled extension, and pip could not "
            f"fetch its source archive to read the operator schemas from: {last}"
        )
    return archives[0]


def _read_member(archive: Path, suffix: str) -> str:
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if member.name.endswith(suffix):
                file = tar.extractfile(member)
                if file is not None:
                    return file.read().decode()
    raise SchemaError(f"{archive.name} has no {suffix}, where the operator schemas should be")
