from pathlib import Path

import pytest

from ascend_opt.simnpu import schemas


def test_schemas_are_found_among_the_strings_of_a_library() -> None:
    """Whole schemas are taken, whatever else the file holds, once each."""
    data = b"\x7fELF\0junk\0op_a(Tensor x, int n=1) -> Tensor\0\1op_b.out(Tensor(a!) o) -> ()\0"
    data += b"not a schema -> no\0op_a(Tensor x, int n=1) -> Tensor\0"
    assert schemas.from_binary(data) == [
        "op_a(Tensor x, int n=1) -> Tensor",
        "op_b.out(Tensor(a!) o) -> ()",
    ]


def test_schemas_are_read_from_cpp_definitions() -> None:
    """Adjacent literals, escapes and raw strings are what C++ makes of them."""
    text = r"""
    ops.def("one(Tensor x,"
            "    int n) -> Tensor");
    ops.def(
        R"(two(str s=\"PA\") -> ())");
    ops.def("no_schema");
    ops.impl("one", torch::kPrivateUse1, &one);
    """
    assert schemas.from_source(text) == [
        "one(Tensor x, int n) -> Tensor",
        'two(str s="PA") -> ()',
    ]


def test_installed_extension_is_preferred(tmp_path: Path) -> None:
    """A wheel brings its schemas along: nothing is fetched."""
    (tmp_path / "vllm_ascend_C.cpython-311.so").write_bytes(b"\0op(Tensor x) -> Tensor\0")
    assert schemas.find_schemas(tmp_path, "1.0") == ["op(Tensor x) -> Tensor"]


def test_extension_without_schemas_is_an_error_that_names_it(tmp_path: Path) -> None:
    """An unfamiliar release is reported, not run without its operators."""
    (tmp_path / "vllm_ascend_C.so").write_bytes(b"\0nothing here\0")
    with pytest.raises(schemas.SchemaError, match=r"no operator schema in .*vllm_ascend_C\.so"):
        schemas.find_schemas(tmp_path, "1.0")


def test_source_that_cannot_be_fetched_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the last line that pip wrote."""
    monkeypatch.setattr(schemas.sys, "executable", "/bin/false")
    with pytest.raises(schemas.SchemaError, match=r"without its compiled extension"):
        schemas.find_schemas(tmp_path, "1.0")
