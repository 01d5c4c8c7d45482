import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascend_opt.simnpu import build


def test_every_listed_symbol_is_built_and_says_success(driver_directory: Path) -> None:
    """Each name of symbols.txt is a function of the driver that returns 0."""
    lib = ctypes.CDLL(str(driver_directory / "libascendcl.so"))
    names = build.read_symbols()
    assert len(names) > 300
    assert {name: getattr(lib, name)() for name in names} == dict.fromkeys(names, 0)


def test_front_libraries_lend_the_driver_s_symbols(driver_directory: Path) -> None:
    """Whichever library torch_npu opens, it finds the driver's functions in it."""
    for name in build.FRONT_LIBRARIES:
        lib = ctypes.CDLL(str(driver_directory / f"lib{name}.so"))
        assert lib.aclrtSynchronizeDevice() == 0


def test_symbol_listed_twice_is_refused(tmp_path: Path) -> None:
    """The list has one line per symbol; the message names the offender."""
    path = tmp_path / "symbols.txt"
    path.write_text("aclFoo\naclBar\naclFoo\n")
    with pytest.raises(build.BuildError, match=r"names aclFoo more than once"):
        build.read_symbols(path)


def test_missing_compiler_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gcc the error says so and what to install, and nothing half built stays behind."""
    monkeypatch.setenv("SIMNPU_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match=r"no gcc on PATH.*apt-get install gcc"):
        build.build_driver()
    assert _visible(tmp_path) == []


def test_refusing_compiler_is_quoted_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error line of the compiler and the command both reach the user."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'x.c:1: error: no such thing' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("SIMNPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(build.BuildError, match=r"exit code 3: x.c:1: error: no such thing"):
        build.build_driver()


def test_op_library_without_torch_npu_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is not there is named, with where its pip command is written down."""
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match=r"torch is not installed.*docs/simnpu.md"):
        build.build_dispatch(tmp_path)


def test_one_of_two_concurrent_builders_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one waits, and both end with the same complete directory."""
    monkeypatch.setenv("SIMNPU_CACHE", str(tmp_path))
    made: list[Path] = []

    def make(out: Path) -> None:
        made.append(out)
        time.sleep(0.2)  # long enough for the other to find it unfinished
        (out / "file").write_text("complete")

    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda _: build._once("x", "1", make), range(2)))
    assert built == [tmp_path / "x-1"] * 2
    assert len(made) == 1
    assert _visible(tmp_path) == ["x-1"]
    assert (tmp_path / "x-1" / "file").read_text() == "complete"


def _visible(directory: Path) -> list[str]:
    return [p.name for p in directory.iterdir() if not p.name.endswith(".lock")]


def test_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call finds the first one's result."""
    monkeypatch.setenv("SIMNPU_CACHE", str(tmp_path))
    calls = []
    assert build._once("x", "1", calls.append) == build._once("x", "1", calls.append)
    assert len(calls) == 1


def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while building neither occupies the final name nor leaves a scratch directory."""
    monkeypatch.setenv("SIMNPU_CACHE", str(tmp_path))

    def make(out: Path) -> None:
        raise build.BuildError("no")

    with pytest.raises(build.BuildError):
        build._once("x", "1", make)
    assert _visible(tmp_path) == []
