import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ascend_opt import Pass, host_patch, registry
from ascend_opt.cli import main
from ascend_opt.compat import sources
from ascend_opt.compat.check import by_nearness
from ascend_opt.compat.nearest import nearest, normalised
from ascend_opt.targets import Source, Target, locate, source_in

TARGET = "fakevllm.runner:Runner.step"


def known_source() -> Source:
    found = locate(Target.parse(TARGET))
    assert found is not None
    return found


def passes(monkeypatch: pytest.MonkeyPatch, *classes: type[Pass]) -> None:
    found = registry.Registry()
    found.add("tests", list(classes))
    monkeypatch.setattr(registry, "discover", lambda: found)


def stepper(known: dict[str, str], target: str = TARGET) -> type[Pass]:
    class Stepper(Pass):
        """Step."""

        name = "stepper"
        origin = remove_when = "test"

        @host_patch(target, known=known)
        def step(self, wrapped, instance, args, kwargs):
            return wrapped(*args, **kwargs)

    return Stepper


def check(*options: str) -> tuple[Result, dict]:
    done = CliRunner().invoke(main, ["compat", "check", "--json", *options])
    return done, json.loads(done.stdout)


def released(monkeypatch: pytest.MonkeyPatch, directory: Path, **texts: str) -> None:
    """Let the registry have these releases of fakevllm: version, with _ for ., to its runner."""
    for version, text in texts.items():
        file = directory / version.replace("_", ".") / "fakevllm" / "runner.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    names = sorted((v.replace("_", ".") for v in texts), reverse=True)
    monkeypatch.setattr(sources, "versions", lambda distribution: names)
    monkeypatch.setattr(sources, "fetch", lambda distribution, version: directory / version)


@pytest.mark.usefixtures("site")
def test_a_recognised_source_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 0, with the variant, the file and the line."""
    here = known_source()
    passes(monkeypatch, stepper({here.fingerprint: "plain"}))
    done, found = check()
    assert done.exit_code == 0
    (target,) = found["passes"][0]["targets"]
    assert (target["variant"], target["file"], target["line"]) == (
        "plain",
        str(here.file),
        here.line,
    )
    assert found["passes"][0]["state"] == "armed"


@pytest.mark.usefixtures("site")
def test_an_unknown_source_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1; the target is named with its hash, and `--fetch` is offered."""
    passes(monkeypatch, stepper({"0" * 16: "plain"}))
    done, found = check()
    assert done.exit_code == 1
    assert found["passes"][0]["changed"] == [TARGET]
    said = CliRunner().invoke(main, ["compat", "check"]).stdout
    assert f"(sha {known_source().fingerprint}, {known_source()})" in said
    assert "--fetch" in said


@pytest.mark.usefixtures("site")
def test_a_target_that_its_installed_package_lacks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there and the method is not: a change as much as an unknown source."""
    passes(monkeypatch, stepper({"0" * 16: "plain"}, "fakevllm.runner:Runner.gone"))
    done, found = check()
    assert done.exit_code == 1
    assert found["passes"][0]["changed"] == ["fakevllm.runner:Runner.gone"]


@pytest.mark.usefixtures("site")
def test_a_package_that_is_not_installed_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass for another package is inapplicable; only where nothing is installed is that wrong."""
    absent = stepper({"0" * 16: "plain"}, "absent_package.runner:Runner.step")
    absent.name = "absent"
    passes(monkeypatch, stepper({known_source().fingerprint: "plain"}), absent)
    done, found = check()
    assert done.exit_code == 0
    assert found["versions"] == {"absent-package": None, "fakevllm": "0"}
    passes(monkeypatch, absent)
    assert check()[0].exit_code == 1


@pytest.mark.usefixtures("site")
def test_fetch_shows_the_most_similar_known_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the nearest releases the known one with most lines alike, as a diff."""
    loop = "        while y:\n            y -= 2\n        return y\n"
    far = f"class Runner:\n    def step(self, y):\n{loop}"
    body = "        # old\n        x = x + 1\n        return x\n"
    near = f"class Runner:\n    def step(self, x):\n{body}"
    unknown = "class Runner:\n    def step(self, x):\n        return x + 1, 'not known either'\n"
    released(monkeypatch, tmp_path, **{"1_2": far, "1_1": near, "1_0": unknown})
    target = Target.parse(TARGET)
    known = {
        sources.locate_in(tmp_path / v, target).fingerprint: f"of {v}"  # type: ignore[union-attr]
        for v in ("1.2", "1.1")
    }
    passes(monkeypatch, stepper(known))
    done, found = check("--fetch")
    assert done.exit_code == 1
    shown = found["passes"][0]["nearest"][TARGET]
    assert (shown["release"], shown["variant"]) == ("fakevllm 1.1", "of 1.1")
    assert shown["diff"].splitlines()[3:] == [
        " def step(self, x):",
        "-    x = x + 1",
        "-    return x",
        "+    return x + 1",
    ]


@pytest.mark.usefixtures("site")
def test_without_a_registry_the_check_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--fetch` that finds no registry says so, and the answer stands."""

    def unavailable(distribution: str) -> list[str]:
        raise sources.SourceUnavailableError("no registry")

    monkeypatch.setattr(sources, "versions", unavailable)
    passes(monkeypatch, stepper({"0" * 16: "plain"}))
    done, found = check("--fetch")
    assert done.exit_code == 1
    assert "no registry" in done.stderr
    assert found["passes"][0]["nearest"] == {}


def test_the_diff_leaves_out_what_the_fingerprint_does(tmp_path: Path) -> None:
    """Equal fingerprints have equal normalised lines: comments, docstrings and types are gone."""
    texts = (
        'async def f(a: int) -> int:\n    """D"""\n    c: int\n    d: int = a # d\n    return d\n',
        "async def f(a):\n    d = (a)\n\n    return d\n",
    )
    found = []
    for number, text in enumerate(texts):
        file = tmp_path / f"{number}.py"
        file.write_text(text)
        found.append(source_in(file, "f"))
    first, second = found
    assert first is not None
    assert second is not None
    assert first.fingerprint == second.fingerprint
    assert normalised(first) == normalised(second)


@pytest.mark.usefixtures("site")
def test_nothing_known_has_no_nearest() -> None:
    """Releases whose source is unknown too are not shown as if they were known."""
    source = known_source()
    patch = stepper({"0" * 16: "plain"}).patches[0]
    assert nearest(patch, source, [("fakevllm 1", source)]) is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.31.1.dev7+gabc", ["0.31.0", "0.30.0", "0.32.0"]),
        ("0.29.0", ["0.30.0", "0.31.0", "0.32.0"]),
        ("nightly", ["0.32.0", "0.31.0", "0.30.0"]),
        ("0", ["0.32.0", "0.31.0", "0.30.0"]),
        (None, ["0.32.0", "0.31.0", "0.30.0"]),
    ],
)
def test_the_nearest_releases_come_first(version: str | None, expected: list[str]) -> None:
    """Downwards from the installed version, then upwards; one that says nothing, newest first."""
    assert by_nearness(["0.32.0", "0.31.0", "0.30.0"], version) == expected


def test_the_check_imports_neither_torch_nor_vllm() -> None:
    """It reads files, so it runs beside any installation."""
    program = (
        "import sys\nfrom ascend_opt.cli import main\n"
        "try:\n    main(['compat', 'check'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'vllm', 'vllm_ascend', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
