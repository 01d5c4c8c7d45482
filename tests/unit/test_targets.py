"""Targets are found on disk, and fingerprinted by what they do."""

import ast
import importlib
import sys

import pytest

from ascend_opt.targets import Target, fingerprint, locate, source_of, whence


def digest(text):
    return fingerprint(ast.parse(text).body[0])


PLAIN = "def f(a, b=1):\n    x = a + b\n    return x\n"


@pytest.mark.parametrize(
    "text",
    [
        "def f(a, b = 1):  # a comment\n\n    x = (a +\n         b)\n    return x\n",
        'def f(a, b=1):\n    """Say something."""\n    x = a + b\n    return x\n',
        "def f(a: int, b: int = 1) -> int:\n    x = a + b\n    return x\n",
        "def f(a, b=1):\n    x: int = a + b\n    return x\n",
        "def f(a, b=1):\n    x: int\n    x = a + b\n    return x\n",
        "def f(a, b=1):  # type: (int, int) -> int\n    x = a + b\n    return x\n",
    ],
    ids=[
        "formatting",
        "docstring",
        "annotations",
        "local annotation",
        "declaration",
        "type comment",
    ],
)
def test_what_says_nothing_does_not_change_the_fingerprint(text):
    """Comments, formatting, docstrings and annotations are not code."""
    assert digest(text) == digest(PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace("a + b", "a - b"),
        PLAIN.replace("b=1", "b=2"),
        PLAIN.replace("b=1", "b=True"),
        PLAIN.replace("b=1", "b=1.0"),
        PLAIN.replace("a, b", "a, *, b"),
        "@cache\n" + PLAIN,
        "async " + PLAIN,
        PLAIN.replace("return x", "return None"),
        PLAIN.replace("return x", "return x('')"),
        PLAIN.replace("return x", "return"),
    ],
)
def test_code_changes_the_fingerprint(text):
    """Every other change is seen: operators, defaults and their types, decorators, signatures."""
    assert digest(text) != digest(PLAIN)


def test_the_fingerprint_is_the_same_on_every_python_version():
    """The hash of one function, fixed: neither `ast.dump` nor Unicode tables may change it."""
    text = (
        "@d\nasync def f(a, /, *b: int, c=(1, 2.5, b'x', 'é\U0001f6dc', None), **k) -> None:\n"
        "    async with a as x, b:\n        y: int = f'{x!r:>{k}} tail'\n"
        "    try:\n        pass\n    except* ValueError:\n        raise\n"
        "    match y:\n        case {'k': [1, *_]}: return lambda: (yield)\n"
    )
    assert digest(text) == "0f8bc77d33cb0573"


def test_locating_imports_nothing(site):
    """The answer comes from files: neither the package nor the module is imported."""
    source = locate(Target.parse("fakevllm.runner:Runner.step"))

    assert (site.directory / "fakevllm/runner.py", 6) == (source.file, source.line)
    assert "fakevllm" not in sys.modules


@pytest.mark.parametrize(
    "target",
    [
        "nopackage.m:f",
        "fakevllm.nomodule:f",
        "fakevllm.runner:nothing",
        "fakevllm.runner:Child.step",
    ],
)
def test_what_is_not_defined_there_is_none(site, target):
    """Missing package, module or name, and an inherited method, all give None."""
    assert locate(Target.parse(target)) is None


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\\ud800'\n", "\0", "(" * 5000])
def test_a_file_that_is_not_python_is_none(site, text):
    """A broken file in the installation is a missing target, never an exception."""
    (site.directory / "fakevllm/broken.py").write_bytes(text.encode("utf-8", "surrogatepass"))

    assert locate(Target.parse("fakevllm.broken:f")) is None


@pytest.mark.parametrize("text", ["", "m", "m:", ":f", "m.:f", "m:f.", "m f:g", "m:f:g", "m:1"])
def test_a_malformed_target_is_refused(text):
    """Only `package.module:Qual.name` is a target."""
    with pytest.raises(ValueError, match=r"expected 'package\.module:Qual\.name'"):
        Target.parse(text)


NESTED = """
    import sys
    if sys.version_info >= (3, 0):
        class C:
            try:
                def f(self): return "taken"
            except ImportError:
                def f(self): return "not taken"
    else:
        class C:
            def f(self): return "other"
    """


def test_definitions_under_if_and_try_are_found(site):
    """A target may stand in any branch; the file's last definition stands for it on disk."""
    site.write("fakevllm/nested.py", NESTED)

    assert "other" in locate(Target.parse("fakevllm.nested:C.f")).text


def test_the_source_of_a_live_function_is_the_branch_that_ran(site):
    """Of several definitions of one name the live one is told apart by its line."""
    site.write("fakevllm/nested.py", NESTED)
    module = importlib.import_module("fakevllm.nested")

    assert '"taken"' in source_of(module.C.f).text


def test_the_source_of_a_decorated_function_is_its_own(site):
    """`functools.wraps` layers are looked through, and the decorator is part of the source."""
    site.write(
        "fakevllm/decorated.py",
        """
        import functools
        def dec(f):
            @functools.wraps(f)
            def g(*a): return f(*a)
            return g
        class C:
            @staticmethod
            @dec
            def f(): return 1
        """,
    )
    module = importlib.import_module("fakevllm.decorated")
    source = source_of(vars(module.C)["f"])

    assert source.fingerprint == locate(Target.parse("fakevllm.decorated:C.f")).fingerprint
    assert source.decorators == 1


def test_whence_names_function_and_file(runner):
    """A message about a live function says where it is."""
    assert whence(runner.free) == f"fakevllm.runner.free ({runner.__file__}:2)"
