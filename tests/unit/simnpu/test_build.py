import ctypes
import threading
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
    assert list(tmp_path.iterdir()) == []


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


def test_concurrent_builds_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builders at once end with one complete directory and no debris."""
    monkeypatch.setenv("SIMNPU_CACHE", str(tmp_path))
    together, made = threading.Barrier(2), []

    def make(out: Path) -> None:
        (out / "file").write_text("complete")
        together.wait(timeout=10)  # both are past the "is it built" check
        made.append(out)

    threads = [threading.Thread(target=build._once, args=("x", "1", make)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["x-1"]
    assert (tmp_path / "x-1" / "file").read_text() == "complete"


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
    assert list(tmp_path.iterdir()) == []
