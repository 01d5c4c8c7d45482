"""The public names, and what importing them costs."""

import subprocess
import sys

import pytest

import ascend_opt


def fresh(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    ).stdout


def test_importing_imports_nothing_heavy():
    """Neither torch nor vllm, nor even our own dependencies."""
    code = "import sys, ascend_opt; print(*sys.modules)"

    loaded = {name.partition(".")[0] for name in fresh(code).split()}

    assert not loaded & {"torch", "torch_npu", "vllm", "vllm_ascend", "pydantic", "wrapt", "yaml"}


def test_using_every_public_name_imports_neither_torch_nor_vllm():
    """The names are loaded when first used; still nothing of what we patch."""
    code = """
import sys, ascend_opt
for name in ascend_opt.__all__:
    getattr(ascend_opt, name)
print(*sys.modules)
"""
    loaded = {name.partition(".")[0] for name in fresh(code).split()}

    assert not loaded & {"torch", "torch_npu", "vllm", "vllm_ascend", "pydantic"}


@pytest.mark.parametrize("name", ascend_opt.__all__)
def test_every_public_name_is_there(name):
    """And `dir` shows it."""
    assert getattr(ascend_opt, name) is not None
    assert name in dir(ascend_opt)


def test_the_fixed_api_is_public():
    """Others script against these."""
    fixed = "enable disable enabled status explain load_config available reset hookimpl"

    assert set(fixed.split()) <= set(ascend_opt.__all__)


def test_all_is_complete():
    """The lazy table and the public list say the same."""
    assert sorted(ascend_opt._HOME_OF) == sorted(ascend_opt.__all__)


def test_an_unknown_name_is_an_attribute_error():
    """As for any module."""
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ascend_opt.nothing


def test_a_status_has_the_fixed_fields():
    """In `as_dict` too, with plain values for JSON."""
    status = ascend_opt.PassStatus("p", ascend_opt.State.OFF, "why")

    fields = ["name", "state", "reason", "parameters", "targets", "counters", "pid", "mode"]
    assert list(status.as_dict()) == fields
