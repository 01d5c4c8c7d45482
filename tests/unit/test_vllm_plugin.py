"""The plugin function: what vLLM calls in each process must not end it."""

import importlib
import threading
from importlib import metadata

import pytest
from unit.conftest import GREETER, STEP

import ascend_opt
from ascend_opt import NotApplicableError, bisect_limit, control, registry, reporting
from ascend_opt.config import ENVIRONMENT
from ascend_opt.vllm_plugin import VARIABLES, register


def state():
    return next(s for s in ascend_opt.status() if s.name == "greeter")


def test_it_applies_the_environment(site, runner, monkeypatch):
    """Passes of the variable are on, in this process."""
    site.provide(site.host(STEP))
    monkeypatch.setenv(ENVIRONMENT, "passes: {greeter: {}}")

    register()

    assert runner.Runner().step(1) == ("patched", 2)


def test_calling_it_again_does_nothing(site, runner, monkeypatch):
    """VLLM may; neither does a change of the variable in between count."""
    site.provide(site.host(STEP))
    monkeypatch.setenv(ENVIRONMENT, "passes: {}")
    register()
    monkeypatch.setenv(ENVIRONMENT, "passes: {greeter: {}}")

    register()

    assert runner.Runner().step(1) == 2


@pytest.mark.parametrize(
    "value", ["{", "/no/such/file", "passes: {nothing: {}}", "\x07", "- a\n- b"]
)
def test_a_bad_variable_is_one_warning(site, monkeypatch, caplog, value):
    """The engine lives, unpatched, and the log says why."""
    site.provide(site.host(STEP))
    monkeypatch.setenv(ENVIRONMENT, value)

    register()

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "all passes stay off in this process" in record.getMessage()


@pytest.mark.parametrize("value", ["off", "{", "", "passes: {}", "passes: {greeter: {}}"])
def test_vllm_knows_each_variable_of_ours_that_is_set(site, monkeypatch, value):
    """It refuses to start for an unknown one, if so asked; a misspelt one stays unknown."""
    site.provide(site.host(STEP))
    known = importlib.import_module("vllm.envs").environment_variables
    for name in (*VARIABLES, f"{ENVIRONMENT}_RUN_DIRECTORY"):
        monkeypatch.setenv(name, value if name == ENVIRONMENT else "1")

    register()

    assert set(known) == set(VARIABLES)
    assert {name: read() for name, read in known.items()} == dict.fromkeys(VARIABLES)


def test_vllm_hears_of_no_variable_that_is_not_set(site, monkeypatch):
    """Its table of variables, which it hashes, is as without us."""
    known = importlib.import_module("vllm.envs").environment_variables
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    register()

    assert known == {}


def test_the_variables_are_those_that_are_read():
    """The plugin function names them without importing who reads them."""
    assert set(VARIABLES) == {ENVIRONMENT, reporting.ENVIRONMENT, bisect_limit.ENVIRONMENT}


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError, RecursionError])
def test_an_error_of_ours_is_logged_and_goes_no_further(monkeypatch, caplog, error):
    """Whatever happens inside."""

    def broken():
        raise error("oops")

    monkeypatch.setenv(ENVIRONMENT, "passes: {greeter: {}}")
    monkeypatch.setattr(registry, "discover", broken)

    register()

    assert "passes stay off in this process" in caplog.text


def test_strict_raises(site, monkeypatch):
    """Policy strict asks for exactly that."""
    site.provide(site.host(STEP, known={"f" * 16: "x"}))
    monkeypatch.setenv(ENVIRONMENT, '{"policy": "strict", "passes": {"greeter": {}}}')

    with pytest.raises(NotApplicableError, match="policy strict"):
        register()


def test_one_pass_that_is_broken_does_not_keep_the_others_off(site, runner, monkeypatch):
    """A pass whose constructor, conditions or own check raise is skipped alone."""

    def broken(self, *args):
        raise RuntimeError("broken pass")

    class Raises(ascend_opt.InstallCondition):
        name = "raises"
        description = "never"

        def unmet(self, subject, parameters):
            raise RuntimeError("broken condition")

    site.provide(
        site.host("fakevllm.runner:free", name="one", facts={"__init__": broken}),
        site.host("fakevllm.runner:free", name="two", facts={"unmet": broken}),
        site.host("fakevllm.runner:free", name="three", facts={"conditions": (Raises(),)}),
        site.host(STEP),
    )
    monkeypatch.setenv(ENVIRONMENT, "passes: {one: {}, two: {}, three: {}, greeter: {}}")

    register()

    assert runner.Runner().step(1) == ("patched", 2)
    assert [s.name for s in ascend_opt.status() if not s.reason] == ["greeter"]
    assert all("broken" in s.reason for s in ascend_opt.status() if s.name != "greeter")


def test_without_the_variable_it_loads_no_pass(site):
    """A vLLM process with nothing asked for pays for no third party's import."""
    site.distribution("test-greeter", "test_greeter", GREETER)

    site.run(
        """
        import os, sys
        from ascend_opt.vllm_plugin import VARIABLES, register
        for name in VARIABLES:
            os.environ.pop(name, None)
        register()
        ours = {name for name in sys.modules if name.startswith("ascend_opt.")}
        assert ours <= {"ascend_opt.vllm_plugin", "ascend_opt.errors"}, ours
        assert not {"test_greeter", "vllm", "torch", "pydantic", "wrapt"} & set(sys.modules)
        """
    )


def test_it_is_the_entry_point_that_vllm_calls():
    """In the group `vllm.general_plugins`, of this distribution."""
    points = metadata.entry_points(group="vllm.general_plugins", name="ascend_opt")

    assert [point.load() for point in points] == [register]


def test_reading_the_environment_is_exclusive(site, runner, monkeypatch):
    """What a thread enables meanwhile comes after what the variable says, not before."""
    entered, go = threading.Event(), threading.Event()
    found = registry.Registry()
    found.add("d", [site.host(STEP)])

    def slow():
        if threading.current_thread().name == "reader":
            entered.set()
            go.wait(10)
        return found

    monkeypatch.setenv(ENVIRONMENT, "off")
    monkeypatch.setattr(registry, "discover", slow)
    reader = threading.Thread(target=control.read_environment, name="reader")
    reader.start()
    entered.wait(10)
    results = []
    user = threading.Thread(target=lambda: results.append(ascend_opt.enable("greeter").state))
    user.start()
    user.join(0.3)  # it would end here if it did not wait for the reader
    go.set()
    reader.join(10)
    user.join(10)

    assert results == ["off"]
