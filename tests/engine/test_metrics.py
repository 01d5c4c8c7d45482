"""The passes on the page of metrics of a real server."""

import json
import time
import urllib.request

import pytest
from engine.serving import complete, serving
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ascend_opt.config import ENVIRONMENT
from ascend_opt.reporting import ENVIRONMENT as RUN_DIRECTORY
from ascend_opt.tiny import write_tiny_model

LAYERS = 4
MAX_TOKENS = 8
A_STEP = 2 * LAYERS
PASSES = {"mlp-prefetch": {"backend": "record"}}


def scrape(address: str) -> list[Sample]:
    time.sleep(2)  # records are written every second
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def value(samples: list[Sample], name: str) -> float:
    (found,) = (s for s in samples if s.name == name and s.labels["role"] == "VllmWorker-0")
    assert found.labels["pass"] == "mlp-prefetch"
    assert (found.labels["engine"], found.labels["rank"]) == ("0", "0")
    return found.value


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> list[list[Sample]]:
    """Scrapes of one server after one request, and after two."""
    directory = tmp_path_factory.mktemp("metrics")
    model = str(write_tiny_model(directory / "tiny", layers=LAYERS))
    environ = {
        ENVIRONMENT: json.dumps({"passes": PASSES}),
        RUN_DIRECTORY: str(directory / "run"),
    }
    with serving(model, directory / "log", environ) as address:
        found = []
        for _ in range(2):
            complete(address, "Hello", MAX_TOKENS)
            found.append(scrape(address))
        return found


def test_the_worker_is_active_on_the_page(scrapes: list[list[Sample]]) -> None:
    """The state of the pass in the worker, which has no page of its own, is on the server's."""
    (state,) = (
        s
        for s in scrapes[0]
        if s.name == "ascend_opt_pass_state" and s.labels["role"] == "VllmWorker-0"
    )
    assert (state.labels["state"], state.value) == ("active", 1)


def test_counters_follow_the_requests(scrapes: list[list[Sample]]) -> None:
    """A request more is its steps and its prefetches more, beside vLLM's own count of tokens."""
    first, second = (value(s, "ascend_opt_pass_steps_total") for s in scrapes)
    assert first >= MAX_TOKENS
    assert second - first >= MAX_TOKENS
    for samples, steps in zip(scrapes, (first, second), strict=True):
        assert value(samples, "ascend_opt_pass_prefetches_total") == steps * A_STEP
        assert value(samples, "ascend_opt_pass_prefetched_bytes_total") > 0
    generated = [
        sum(s.value for s in samples if s.name == "vllm:generation_tokens_total")
        for samples in scrapes
    ]
    assert generated == [MAX_TOKENS, 2 * MAX_TOKENS]
