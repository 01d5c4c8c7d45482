"""What changes the graph enters vLLM's compile-cache key, and nothing else does."""

import importlib
from dataclasses import dataclass

import pytest
from unit.conftest import FORWARD, STEP

import ascend_opt
from ascend_opt.config import ENVIRONMENT


@dataclass(frozen=True)
class Parameters:
    size: int = 1


def make(self, original):
    return lambda this, x: original(this, x)


@pytest.fixture
def key(site):
    """Return a function that gives what vLLM would hash."""
    getters = importlib.import_module("vllm.envs").environment_variables

    def current():
        return getters[ENVIRONMENT]() if ENVIRONMENT in getters else None

    return current


def graph(site, version="1"):
    return site.traced(FORWARD, make, Parameters=Parameters, changes_graph=True, version=version)


def test_nothing_enters_before_a_pass_is_on(site, key):
    """An installed pass that nobody enabled is no factor."""
    site.provide(graph(site))
    ascend_opt.status()

    assert key() is None


def test_equal_runs_have_equal_keys(site, key):
    """They share artifacts."""
    site.provide(graph(site))
    ascend_opt.enable("tracer", size=2)
    first = key()
    ascend_opt.reset()
    ascend_opt.enable("tracer", size=2)

    assert first
    assert key() == first


def test_parameters_version_and_absence_make_other_keys(site, key, monkeypatch):
    """No two of these may load each other's artifact; off again is as if never on."""
    site.provide(graph(site))
    ascend_opt.enable("tracer")
    keys = [key()]
    ascend_opt.enable("tracer", size=2)
    keys.append(key())
    ascend_opt.disable("tracer")
    keys.append(key())
    ascend_opt.reset()
    site.provide(graph(site, version="2"))
    ascend_opt.enable("tracer")
    keys.append(key())
    monkeypatch.setattr("ascend_opt.controller._library_version", lambda: "9.9")
    keys.append(key())

    assert len(set(keys)) == 5
    assert keys[2] is None


def test_a_pass_that_leaves_the_graph_alone_does_not_enter(site, key):
    """Host passes cost no recompilation."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")

    assert key() is None


def test_a_pass_that_was_refused_leaves_the_key(site, key):
    """What is not in the graph must not be in its key."""
    site.provide(
        site.traced(FORWARD, make, changes_graph=True, conditions=(ascend_opt.NoSpeculator(),))
    )
    ascend_opt.enable("tracer")
    assert key()

    class Config:
        speculative_config = object()

    worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase(Config())

    assert key() is None
    del worker


def test_it_enters_whether_vllm_envs_comes_before_or_after(site):
    """Enabled first, imported later."""
    site.provide(graph(site))
    ascend_opt.enable("tracer")

    getters = importlib.import_module("vllm.envs").environment_variables

    assert getters[ENVIRONMENT]()
