"""Kernels take what the operators of the real packages are declared to take."""

from pathlib import Path

from npu.conftest import Simulate, read_result


def test_signatures_equal_the_schemas(simulate: Simulate) -> None:
    """Names, order, keyword-only arguments and defaults of every kernel are those of its schema."""
    result = read_result(simulate(Path(__file__).with_name("signature_program.py")))

    assert result["wrong"] == []
    assert {"npu", "atb", "_C_ascend"} == set(result["namespaces"])
