"""Builds the simulated driver and the operator library, once, into a per-user cache.

A build is named after a hash of everything that goes into it, is made in a temporary directory and
renamed into place, so nothing is ever half there. Of two processes that want the same build at the
same time, one makes it and the other waits.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).parent
DRIVER_SOURCES = HERE / "driver"
DISPATCH_SOURCES = HERE / "dispatch"
DISPATCH_MODULE = "simnpu_dispatch"

# The libraries that torch_npu opens by name. All meaning is in libascendcl.so; the others are empty
# and depend on it, which makes its symbols theirs.
FRONT_LIBRARIES = [
    "acl_op_compiler",
    "acl_tdt_channel",
    "ascend_hal",
    "ascend_ml",
    "ascend_protobuf",
    "atb",
    "fmk_parser",
    "ge_runner",
    "graph",
    "hccl",
    "msprofiler",
    "mspti",
    "opapi",
    "profapi",
    "runtime",
]


# Part of what a build is named after: change them, and it is another build.
_DRIVER_FLAGS = ("-O2", "-g", "-shared", "-fPIC")
_DISPATCH_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={DISPATCH_MODULE}")


class BuildError(RuntimeError):
    """The driver or the operator library cannot be built; the message says what to do."""


def cache_root() -> Path:
    """Return where everything built goes: ``SIMNPU_CACHE``, or the user's cache directory."""
    if chosen := os.environ.get("SIMNPU_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ascend_opt" / "simnpu"


def read_symbols(path: Path = DRIVER_SOURCES / "symbols.txt") -> list[str]:
    """Return the names of the driver functions that do nothing, one a line in ``path``."""
    names = path.read_text().split()
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise BuildError(
            f"{path} names {', '.join(repeated)} more than once; keep one line of each"
        )
    return names


def stub_source(names: Iterable[str]) -> str:
    """Return C text that defines every name as a function returning 0, which means success."""
    lines = [f"long {name}(void) {{ return 0; }}" for name in names]
    return "\n".join(lines) + "\n"


def build_driver() -> Path:
    """Build the simulated driver where that has not been done.

    Returns:
        The directory to put on ``LD_LIBRARY_PATH``.

    Raises:
        BuildError: If gcc is missing or refuses the sources.
    """
    sources = sorted(DRIVER_SOURCES.iterdir())

    def compile_into(out: Path) -> None:
        gcc = _compiler("gcc", "CC")
        stubs = out / "stubs.c"
        stubs.write_text(stub_source(read_symbols()))
        library = out / "libascendcl.so"
        units = [str(p) for p in sources if p.suffix == ".c"]
        _run([gcc, *_DRIVER_FLAGS, "-o", str(library), *units, str(stubs), "-lpthread"])
        for expected in ("runtime", "compiler"):  # torch_npu looks for them at import
            (out / expected).mkdir()
        empty = out / "empty.c"
        empty.write_text("")
        for name in FRONT_LIBRARIES:
            link = [f"-L{out}", "-Wl,--no-as-needed", "-lascendcl", "-Wl,-rpath,$ORIGIN"]
            _run([gcc, "-shared", "-fPIC", "-o", str(out / f"lib{name}.so"), str(empty), *link])

    return _once("driver", _digest(sources, *_DRIVER_FLAGS, *FRONT_LIBRARIES), compile_into)


def build_dispatch(driver: Path) -> Path:
    """Build the operator library against the installed torch and torch_npu.

    Args:
        driver: What :func:`build_driver` returned.

    Returns:
        The library, a Python extension module named ``simnpu_dispatch``.

    Raises:
        BuildError: If g++, torch or torch_npu is missing, or the compiler refuses the sources.
    """
    torch, torch_npu = _package("torch"), _package("torch_npu")
    sources = sorted(DISPATCH_SOURCES.iterdir())
    versions = [f"{n} {importlib.metadata.version(n)}" for n in ("torch", "torch_npu")]
    digest = _digest(sources, *_DISPATCH_FLAGS, *versions, sys.version)

    def compile_into(out: Path) -> None:
        gxx = _compiler("g++", "CXX")
        includes = [
            f"-I{torch}/include",
            f"-I{torch}/include/torch/csrc/api/include",
            f"-I{torch_npu}/include",
            f"-I{sysconfig.get_path('include')}",
        ]
        # One unit: nearly all of the time goes into torch's headers, which are then read once.
        unit = out / "all.cpp"
        unit.write_text("".join(f'#include "{p}"\n' for p in sources if p.suffix == ".cpp"))
        paths = [f"-L{torch}/lib", f"-L{torch_npu}/lib", f"-L{driver}"]
        libraries = "c10 torch torch_cpu torch_python torch_npu ascendcl"
        links = [f"-l{name}" for name in libraries.split()]
        target = ["-o", str(out / f"{DISPATCH_MODULE}.so")]
        _run([gxx, *_DISPATCH_FLAGS, "-shared", *includes, str(unit), *target, *paths, *links])

    return _once("dispatch", digest, compile_into) / f"{DISPATCH_MODULE}.so"


def _once(kind: str, digest: str, make: Callable[[Path], None]) -> Path:
    final = cache_root() / f"{kind}-{digest}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with open(final.with_name(f".{final.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when the file is closed, or its process dies
        if final.is_dir():
            return final
        scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=final.parent))
        try:
            make(scratch)
            scratch.chmod(0o755)
            scratch.rename(final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return final


def _digest(paths: Iterable[Path], *more: str) -> str:
    h = hashlib.sha256()
    for path in paths:
        h.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for text in more:
        h.update(text.encode() + b"\0")
    return h.hexdigest()[:16]


def _compiler(name: str, variable: str) -> str:
    wanted = os.environ.get(variable) or name
    found = shutil.which(wanted)
    if found is None:
        raise BuildError(
            f"no {wanted} on PATH: simnpu compiles its driver on this machine. Install it "
            f"(Debian and Ubuntu: apt-get install gcc g++; Fedora: dnf install gcc gcc-c++), or "
            f"name another compiler in {variable}"
        )
    return found


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            f"{name} is not installed in {sys.prefix}: simnpu runs the real one. "
            f"docs/simnpu.md has the pip commands of both supported sets"
        )
    return Path(spec.submodule_search_locations[0])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise BuildError(
            f"{Path(command[0]).name} failed with exit code {done.returncode}: "
            f"{errors[0].strip()}\n"
            f"The command was: {' '.join(command)}"
        )
