"""Fuzz: no text in a file or in VLLM_ASCEND_OPT does more than switch passes on, or say no."""

import logging
import os
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.conftest import STEP
from unit.test_config import CLASSES, DOCUMENTS

import ascend_opt
from ascend_opt import ConfigError, control
from ascend_opt.config import ENVIRONMENT, from_environment, parse

EXAMPLES = pytest.mark.parametrize(
    "examples", [300, pytest.param(10_000, marks=pytest.mark.extended)]
)
GREETERS = st.sampled_from(["greeter", "second", "no-such-pass"])
ENTRIES = st.sampled_from(["{}", "{allow_unknown: true}", "{limit: 1}", "{targets: []}", "3", ""])
NEAR = st.lists(st.tuples(GREETERS, ENTRIES), max_size=3).map(
    lambda passes: "passes: {" + ", ".join(f"{name}: {entry}" for name, entry in passes) + "}"
)
TAGGED = [
    "passes: !!python/object/apply:os.system ['touch pwned']",
    "passes: {fast: {note: !!python/name:os.system ''}}",
    "passes: {fast: {targets: !!python/object/new:os._exit [3]}}",
    "passes: {fast: {note: !!python/module:this ''}}",
]
HOSTILE = st.sampled_from(TAGGED)
# Null bytes and surrogates cannot stand in an environment variable.
TEXTS = (NEAR | HOSTILE | DOCUMENTS | st.text(max_size=80)).map(
    lambda text: text.replace("\0", "").encode("utf-8", "ignore").decode()
)


@pytest.mark.parametrize("text", TAGGED)
def test_a_tag_that_names_code_is_refused(text, tmp_path, monkeypatch):
    """YAML is loaded safely: nothing is imported, called or made, and the place is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "this", raising=False)

    with pytest.raises(ConfigError, match=r"^c\.yaml:1:\d+: not valid YAML: .*tag"):
        parse(text, "c.yaml", CLASSES)

    assert "this" not in sys.modules
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_names_passes_and_no_place_to_import_them_from(tmp_path, monkeypatch):
    """A module beside the file, a path, an entry-point value: none of them is a pass."""
    (tmp_path / "evil.py").write_text("open('pwned', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("evil", "evil:Evil", "./evil.py", str(tmp_path / "evil.py")):
        path = tmp_path / "c.yaml"
        path.write_text(f"passes: {{'{name}': {{}}}}")
        with pytest.raises(ConfigError, match="unknown pass"):
            ascend_opt.load_config(path)

    assert "evil" not in sys.modules
    assert not (tmp_path / "pwned").exists()


@EXAMPLES
def test_a_document_is_a_configuration_or_a_config_error(examples):
    """Of 10,000 texts none raises anything else, and none imports a module."""

    @settings(max_examples=examples, deadline=None)
    @given(DOCUMENTS | NEAR | HOSTILE | st.text(max_size=80))
    def fuzz(text):
        for read in (
            lambda: parse(text, "c.yaml", CLASSES),
            lambda: from_environment(text, CLASSES),
        ):
            try:
                found = read()
            except ConfigError:
                continue
            assert all(request.name in CLASSES for request in found.requests)

    fuzz()


@EXAMPLES
def test_a_variable_switches_on_all_that_it_says_or_nothing(
    site, runner, examples, tmp_path, monkeypatch
):
    """Of 10,000 values of VLLM_ASCEND_OPT none raises, and none is half applied."""
    site.provide(site.host(STEP), site.host("fakevllm.runner:free", name="second"))
    original, free = vars(runner.Runner)["step"], runner.free
    monkeypatch.chdir(tmp_path)

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(TEXTS)
    def fuzz(text):
        os.environ[ENVIRONMENT] = text
        try:
            asked = {
                r.name
                for r in from_environment(text, control.registry.discover().classes()).requests
            }
        except ConfigError:
            asked = set()
        control.read_environment()
        on = {s.name for s in ascend_opt.status() if s.state == "active"}
        assert on == asked
        assert (vars(runner.Runner)["step"] is not original) == ("greeter" in asked)
        assert (runner.free is not free) == ("second" in asked)
        control.reset()
        assert vars(runner.Runner)["step"] is original
        assert runner.free is free

    logging.getLogger("vllm.ascend_opt").disabled = True
    try:
        fuzz()
    finally:
        logging.getLogger("vllm.ascend_opt").disabled = False
        os.environ.pop(ENVIRONMENT, None)

    assert not (tmp_path / "pwned").exists()
