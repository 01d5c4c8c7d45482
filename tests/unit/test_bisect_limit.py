"""Leaving patches out: by hand, with a number, and by name, as `bisect` does."""

import importlib
import json
import logging

import pytest
from unit.conftest import STEP

import ascend_opt
from ascend_opt import ConfigError, ParameterError, control
from ascend_opt.bisect_limit import ENVIRONMENT
from ascend_opt.config import ENVIRONMENT as CONFIGURATION

SCALE = "fakevllm.runner:Runner.boom"
FREE = "fakevllm.runner:free"


@pytest.fixture
def passes(site):
    """Two passes, of two patches and one."""
    site.provide(
        site.host(STEP, FREE, name="two", known={**site.known(STEP), **site.known(FREE)}),
        site.host(SCALE, name="one"),
    )


def in_place(*names):
    importlib.import_module("fakevllm.runner")
    found = {status.name: status for status in ascend_opt.status()}
    return [target.target for name in names for target in found[name].targets if target.patched]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("0", []), ("1", [STEP]), ("2", [STEP, FREE]), ("3", [STEP, FREE, SCALE]), ("9", None)],
)
def test_only_the_first_n_patches_are_applied(passes, monkeypatch, limit, expected):
    """Patches are numbered in the order of the configuration, then of the class."""
    monkeypatch.setenv(ENVIRONMENT, limit)
    ascend_opt.load_config({"passes": {"two": {}, "one": {}}})
    assert in_place("two", "one") == ([STEP, FREE, SCALE] if expected is None else expected)


def test_each_patch_is_printed_with_its_number(passes, monkeypatch, caplog):
    """The log says which patch is which, and what becomes of it."""
    monkeypatch.setenv(ENVIRONMENT, "2")
    with caplog.at_level(logging.WARNING, "vllm.ascend_opt"):
        ascend_opt.load_config({"passes": {"two": {}, "one": {}}})
    lines = [r.getMessage() for r in caplog.records if "bisect" in r.getMessage()]
    assert lines == [
        f"ascend_opt: bisect: patch 1, two, {STEP}: to be applied",
        f"ascend_opt: bisect: patch 2, two, {FREE}: to be applied",
        f"ascend_opt: bisect: patch 3, one, {SCALE}: left out (limit 2)",
    ]


def test_numbers_are_the_same_when_a_pass_is_asked_for_again(passes, monkeypatch):
    """A patch keeps its number in a process, so the limit means the same thing all along."""
    monkeypatch.setenv(ENVIRONMENT, "2")
    ascend_opt.load_config({"passes": {"two": {}}})
    ascend_opt.disable("two")
    ascend_opt.enable("two")
    assert in_place("two") == [STEP, FREE]


def test_numbers_start_again_after_a_reset(passes, monkeypatch):
    """As if the library had just been imported."""
    monkeypatch.setenv(ENVIRONMENT, "1")
    ascend_opt.load_config({"passes": {"one": {}}})
    ascend_opt.reset()
    ascend_opt.load_config({"passes": {"two": {}}})
    assert in_place("two") == [STEP]


def test_a_pass_with_nothing_left_is_off_and_says_why(passes, monkeypatch):
    """A pass beyond the limit is no error, not even where the policy is strict."""
    monkeypatch.setenv(ENVIRONMENT, "0")
    statuses = ascend_opt.load_config({"policy": "strict", "passes": {"one": {}}})
    assert [(s.state, ENVIRONMENT in s.reason) for s in statuses] == [("off", True)]
    assert "one" in control.requests()  # child processes number it too


def test_a_limit_that_is_no_number_leaves_nothing_out(passes, monkeypatch, caplog):
    """Garbage in the variable is one warning, and every patch is applied."""
    monkeypatch.setenv(ENVIRONMENT, "two")
    with caplog.at_level(logging.WARNING, "vllm.ascend_opt"):
        ascend_opt.load_config({"passes": {"one": {}}})
    assert f"{ENVIRONMENT}='two': expected a number" in caplog.text
    assert in_place("one") == [SCALE]


def test_targets_restrict_a_pass(passes):
    """Only the named targets are patched; the others say that they were left out."""
    ascend_opt.load_config({"passes": {"two": {"targets": [FREE]}}})
    assert in_place("two") == [FREE]
    status = next(s for s in ascend_opt.status() if s.name == "two")
    assert {t.target: bool(t.note) for t in status.targets} == {STEP: True, FREE: False}


def test_targets_reach_child_processes(passes, monkeypatch):
    """The restriction is part of what VLLM_ASCEND_OPT carries."""
    ascend_opt.enable("two", targets=[FREE])
    import os

    assert json.loads(os.environ[CONFIGURATION])["passes"]["two"]["targets"] == [FREE]


def test_a_target_of_another_pass_is_refused(passes):
    """An error names the pass's own targets and the nearest."""
    with pytest.raises(ConfigError, match=rf"no target '{FREE}e'; did you mean '{FREE}'"):
        ascend_opt.load_config({"passes": {"two": {"targets": [f"{FREE}e"]}}})
    with pytest.raises(ParameterError, match="expected a list"):
        ascend_opt.enable("two", targets=[])


def test_what_is_left_out_enters_the_compile_cache_key(site, monkeypatch):
    """A model compiled with fewer patches is another model."""
    two = site.host(STEP, FREE, name="two", known={**site.known(STEP), **site.known(FREE)})
    two.changes_graph = True
    site.provide(two)
    ascend_opt.enable("two")
    whole = control.graph_fingerprint()
    ascend_opt.enable("two", targets=[FREE])
    part = control.graph_fingerprint()
    control.reset()
    monkeypatch.setenv(ENVIRONMENT, "1")
    ascend_opt.enable("two")
    assert len({whole, part, control.graph_fingerprint()}) == 3
