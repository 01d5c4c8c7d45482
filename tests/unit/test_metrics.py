"""What a scrape says of the passes, and that it costs the server nothing if it fails."""

import importlib
import os
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from unit.conftest import STEP

from ascend_opt import PassStatus, State, metrics
from ascend_opt.config import ENVIRONMENT
from ascend_opt.metrics import PassCollector, family_of
from ascend_opt.reporting import Process, Record
from ascend_opt.vllm_plugin import register

WORKER = Process(os.getpid() + 1, 5, os.getpid(), "VllmWorker-0", 1, 0)


def record(process=WORKER, **counters):
    return Record(process, 1.0, (PassStatus("p", State.ACTIVE, "does it", counters=counters),))


@pytest.fixture
def records(monkeypatch):
    """The records that a scrape finds; they may be changed between scrapes."""
    found = [record(steps=3)]
    monkeypatch.setattr(metrics, "read_records", lambda: list(found))
    return found


@pytest.fixture
def scrape(records):
    """Scrape as Prometheus does: text, read by its own parser."""
    registry = CollectorRegistry()
    registry.register(PassCollector())

    def scraped():
        text = generate_latest(registry).decode()
        return {
            (sample.name, sample.labels.get("rank"), sample.labels.get("reason")): sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    return scraped


def values(found, name):
    return [sample.value for key, sample in found.items() if key[0] == name]


def test_state_and_counters_of_a_worker(records, scrape):
    """A gauge says the state, a counter each thing that the pass counts, both who and where."""
    records[:] = [record(steps=3, bytes_prefetched=4096)]
    found = scrape()
    state = found["ascend_opt_pass_state", "1", None]
    assert state.value == 1
    assert state.labels == {
        "pass": "p",
        "state": "active",
        "mode": "active",
        "role": "VllmWorker-0",
        "engine": "0",
        "rank": "1",
        "pid": str(WORKER.pid),
    }
    steps = found["ascend_opt_pass_steps_total", "1", None]
    assert steps.value == 3
    assert steps.labels == {"pass": "p", "role": "VllmWorker-0", "engine": "0", "rank": "1"}
    assert values(found, "ascend_opt_pass_prefetched_bytes_total") == [4096]


@pytest.mark.parametrize(
    ("counter", "family"),
    [
        ("steps", ("ascend_opt_pass_steps", "")),
        ("bytes_prefetched", ("ascend_opt_pass_prefetched_bytes", "")),
        ("skipped: no storage", ("ascend_opt_pass_skipped", "no storage")),
        ("Odd-Name total", ("ascend_opt_pass_odd_name", "")),
    ],
)
def test_names_are_those_that_prometheus_wants(counter, family):
    """Lower case, the unit last, `_total` once, and a reason as a label."""
    assert family_of(counter) == family


def test_a_counter_never_goes_back(records, scrape):
    """Neither when a pass begins anew, nor when its process is gone."""
    assert values(scrape(), "ascend_opt_pass_steps_total") == [3]
    records[:] = [record(steps=1)]
    assert values(scrape(), "ascend_opt_pass_steps_total") == [4]
    records[:] = []
    assert values(scrape(), "ascend_opt_pass_steps_total") == [4]
    assert values(scrape(), "ascend_opt_pass_state") == []


def test_only_this_servers_processes_are_seen(records, scrape):
    """Another server of the same user has its own page."""
    records[:] = [record(Process(1, 5, 0, "Worker", 0, 0), steps=9), record(steps=3)]
    assert values(scrape(), "ascend_opt_pass_steps_total") == [3]


def test_records_that_cannot_be_read_are_said_once(monkeypatch, caplog, scrape):
    """The rest of the page is served."""

    def broken():
        raise PermissionError("not yours")

    monkeypatch.setattr(metrics, "read_records", broken)
    assert scrape() == scrape() == {}
    assert caplog.text.count("no metrics of passes: PermissionError") == 1


SERVED = """
    from prometheus_client import REGISTRY

    def get_prometheus_registry():
        return REGISTRY
    """


@pytest.fixture
def vllm_metrics(site):
    """Return vLLM's module of metrics, imported after what the test does first."""
    site.write("vllm/v1/metrics/__init__.py", "")
    site.write("vllm/v1/metrics/prometheus.py", SERVED)
    yield lambda: importlib.import_module("vllm.v1.metrics.prometheus")
    for found in [c for c in list(REGISTRY._collector_to_names) if type(c) is PassCollector]:
        REGISTRY.unregister(found)


def ours():
    return sum(type(found) is PassCollector for found in REGISTRY._collector_to_names)


@pytest.mark.parametrize(("passes", "expected"), [("{greeter: {}}", 1), ("{}", 0)])
def test_vllms_registry_is_joined_once_where_a_pass_is_asked_for(
    site, runner, vllm_metrics, monkeypatch, passes, expected
):
    """However often vLLM asks for its registry; and not at all without a pass."""
    site.provide(site.host(STEP))
    monkeypatch.setenv(ENVIRONMENT, f"passes: {passes}")
    register()
    register()
    for _ in range(2):
        assert vllm_metrics().get_prometheus_registry() is REGISTRY
    assert ours() == expected


def test_a_registry_that_cannot_be_joined_is_returned_all_the_same(
    site, runner, vllm_metrics, monkeypatch, caplog
):
    """A failure costs the metrics, never the server."""
    site.provide(site.host(STEP))
    monkeypatch.setenv(ENVIRONMENT, "passes: {greeter: {}}")
    monkeypatch.setattr(REGISTRY, "register", lambda collector: 1 / 0)
    register()
    assert vllm_metrics().get_prometheus_registry() is REGISTRY
    assert "no metrics of passes: ZeroDivisionError" in caplog.text


def test_a_vllm_without_such_a_registry_is_left_alone(site, runner, vllm_metrics, monkeypatch):
    """Another release may have none."""
    site.provide(site.host(STEP))
    site.write("vllm/v1/metrics/prometheus.py", "other = 1")
    monkeypatch.setenv(ENVIRONMENT, "passes: {greeter: {}}")
    register()
    assert vars(vllm_metrics())["other"] == 1


def test_several_api_servers_share_the_engines_numbers(monkeypatch, records):
    """In multiprocess mode every registry that is made for a scrape shows the launcher's tree."""
    from prometheus_client import multiprocess

    monkeypatch.setattr(
        multiprocess.MultiProcessCollector, "collect", lambda self: iter(["vllm's own"])
    )
    launcher = SimpleNamespace(pid=WORKER.parent)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: launcher)
    for _ in range(2):
        metrics._join(CollectorRegistry())
    found = list(
        multiprocess.MultiProcessCollector.__new__(multiprocess.MultiProcessCollector).collect()
    )
    assert found[0] == "vllm's own"
    assert [family.name for family in found[1:]] == [
        "ascend_opt_pass_state",
        "ascend_opt_pass_steps",
    ]
