"""The framework in a real vLLM, with a third party's passes; one patched engine for all claims."""

from pathlib import Path
from typing import Any

import pytest
from engine.third_party import fingerprint_of, install

from ascend_opt.config import ENVIRONMENT
from ascend_opt.proof.engine_run import Job, Outcome, run
from ascend_opt.recognition import recognise
from ascend_opt.tiny import write_tiny_model

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
PROMPTS = ("Hello, world", "The quick brown fox")
MAX_TOKENS = 12

PACKAGE = """
    from ascend_opt import EngineCondition, Pass, Requires, hookimpl, host_patch

    class Never(EngineCondition):
        name = "never"
        description = "never"

        def unmet(self, subject, parameters):
            return f"max_model_len={{subject.model_config.max_model_len}}"

    class Greeter(Pass):
        '''Count the steps.'''
        name = "greeter"
        origin = remove_when = "test"
        conditions = (Requires("vllm"),)

        @host_patch("{runner}.execute_model", known={{"{execute_model}": "here"}})
        def execute_model(self, wrapped, runner, args, kwargs):
            self.counters["steps"] += 1
            return wrapped(*args, **kwargs)

    class Refused(Greeter):
        '''Meet a condition that this engine does not.'''
        name = "refused"
        conditions = (Never(),)

    class Clumsy(Pass):
        '''Fail at the third step.'''
        name = "clumsy"
        origin = remove_when = "test"

        @host_patch("{runner}.sample_tokens", known={{"{sample_tokens}": "here"}})
        def sample_tokens(self, wrapped, runner, args, kwargs):
            self.counters["steps"] += 1
            if self.counters["steps"] == 3:
                raise RuntimeError("clumsy indeed")
            return wrapped(*args, **kwargs)

    @hookimpl
    def ascend_opt_passes():
        return [Greeter, Refused, Clumsy]
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third party's distribution, as pip would have installed it."""
    directory = tmp_path_factory.mktemp("third-party")
    text = PACKAGE.format(
        runner=RUNNER,
        execute_model=fingerprint_of(f"{RUNNER}.execute_model"),
        sample_tokens=fingerprint_of(f"{RUNNER}.sample_tokens"),
    )
    install(directory, "greeter", text)
    return directory


@pytest.fixture(scope="module")
def engine(package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("engine")
    return {
        "model": str(write_tiny_model(directory / "tiny")),
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "engine": {
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "fail_on_environ_validation": True,  # variables of ours are known to vLLM
        },
        "environment": {
            "PYTHONPATH": str(package),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(directory / "cache"),
        },
    }


@pytest.fixture(scope="module")
def unpatched(engine: dict[str, Any]) -> Outcome:
    """An engine whose configuration is garbage: it has to live, unpatched."""
    environment = {**engine["environment"], ENVIRONMENT: "{passes: [greeter]}"}
    return run(Job(**{**engine, "environment": environment}))


@pytest.fixture(scope="module")
def patched(engine: dict[str, Any]) -> Outcome:
    return run(Job(**engine, passes={"greeter": {}, "refused": {}, "clumsy": {}}))


@pytest.fixture
def workers(patched: Outcome) -> dict[str, Any]:
    found = [record for record in patched.records if record["rank"] is not None]
    assert len(found) == 1
    return {status["name"]: status for status in found[0]["passes"]}


def test_an_engine_with_a_garbage_configuration_lives(unpatched: Outcome) -> None:
    """What is wrong with VLLM_ASCEND_OPT costs the passes, never the engine."""
    assert [len(tokens) for tokens in unpatched.tokens] == [MAX_TOKENS] * len(PROMPTS)
    assert unpatched.records == []


def test_tokens_are_the_same(unpatched: Outcome, patched: Outcome) -> None:
    """Passes that change nothing change no token, one that fails half-way included."""
    assert patched.tokens == unpatched.tokens


def test_a_third_partys_pass_is_active_in_the_worker(workers: dict[str, Any]) -> None:
    """The configuration reaches the worker process, and the patch runs at every step."""
    assert workers["greeter"]["state"] == "active"
    assert workers["greeter"]["counters"]["steps"] >= MAX_TOKENS


def test_the_other_processes_stay_armed(patched: Outcome) -> None:
    """Where no engine's worker lives nothing is patched, and the state says so."""
    others = [record for record in patched.records if record["rank"] is None]
    assert {record["role"] for record in others} >= {"main", "EngineCore"}
    assert {s["state"] for r in others for s in r["passes"]} == {"armed"}


def test_an_engine_condition_sees_the_real_configuration(workers: dict[str, Any]) -> None:
    """An unmet engine condition takes the patch out, with what was found in the VllmConfig."""
    assert workers["refused"]["state"] == "inapplicable"
    assert workers["refused"]["reason"] == "max_model_len=256"
    assert not any(target["patched"] for target in workers["refused"]["targets"])


def test_a_pass_that_raises_is_switched_off_and_the_engine_lives(workers: dict[str, Any]) -> None:
    """An error of ours at the third step costs the pass; the step is done by the original."""
    assert workers["clumsy"]["state"] == "failed"
    assert "clumsy indeed" in workers["clumsy"]["reason"]
    assert workers["clumsy"]["counters"]["steps"] == 3
    assert not any(target["patched"] for target in workers["clumsy"]["targets"])


def test_every_built_in_target_in_this_vllm_is_recognised() -> None:
    """The installed vLLM's Qwen modules are among the sources that mlp-prefetch knows."""
    from ascend_opt_passes.mlp_prefetch import MlpPrefetch

    assert [recognise(patch).variant for patch in MlpPrefetch.patches if recognise(patch).source]
    assert all(recognise(patch).variant for patch in MlpPrefetch.patches)
