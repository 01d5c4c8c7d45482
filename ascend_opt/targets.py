"""Targets: where something in an installed package is, and what its source is.

Nothing here imports the package that it looks at: the answer comes from files, so it is the same
before and after the import, and cheap enough for a command line.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Decorators that lay no `__wrapped__` layer around what they decorate.
_TRANSPARENT = {"staticmethod", "classmethod", "abstractmethod", "override", "final", "overload"}


@dataclass(frozen=True)
class Target:
    """`package.module:Qual.name` of a function, method or class in an installed package."""

    module: str
    qualname: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `package.module:Qual.name`.

        Raises:
            ValueError: The text has another form.
        """
        module, _, qualname = text.partition(":")
        parts = [*module.split("."), *qualname.split(".")]
        if not all(part.isidentifier() for part in parts):
            raise ValueError(f"target {text!r}: expected 'package.module:Qual.name'")
        return cls(module, qualname)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Source:
    """Where a target is defined, and the fingerprint of its code.

    Attributes:
        file: Its file.
        line: Line of the `def`, 1-based.
        fingerprint: See `fingerprint`.
        end: Its last line.
        decorators: How many of its decorators may lay a wrapper around it.
    """

    file: Path
    line: int
    fingerprint: str
    end: int
    decorators: int

    @property
    def text(self) -> str:
        """The code as it is written, whole lines."""
        # Not splitlines: a form feed is no new line to Python's parser.
        lines = self.file.read_text(encoding="utf-8").split("\n")
        return "\n".join(lines[self.line - 1 : self.end])

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def package_directories(package: str) -> list[Path]:
    """Return the directories of an installed top-level package, without importing it."""
    loaded = sys.modules.get(package)
    if loaded is not None and getattr(loaded, "__path__", None):
        return [Path(entry) for entry in loaded.__path__]
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(entry) for entry in spec.submodule_search_locations]


def module_file(module: str) -> Path | None:
    """Return the source file of a module, without importing it or its parents."""
    package, *rest = module.split(".")
    for directory in package_directories(package):
        base = directory.joinpath(*rest)
        for candidate in (base / "__init__.py", base.with_suffix(".py")):
            if rest and candidate.is_file():
                return candidate
        if not rest and (directory / "__init__.py").is_file():
            return directory / "__init__.py"
    return None


def locate(target: Target) -> Source | None:
    """Return the source of a target, or None where its package, module or name is missing."""
    file = module_file(target.module)
    return None if file is None else source_in(file, target.qualname)


def source_in(file: Path, qualname: str, first_line: int | None = None) -> Source | None:
    """Return the source of `qualname` in a file, or None where the file does not define it.

    Args:
        file: A Python file.
        qualname: `Qual.name`.
        first_line: The line on which the definition starts, decorators included, to tell apart
            those of one name (in the branches of an `if`); None takes the last.
    """
    try:
        stat = file.stat()
        tree = _parse(file, stat.st_mtime_ns, stat.st_size)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = find_definitions(tree, qualname)
    if first_line is not None:
        found = [node for node in found if _first_line(node) == first_line]
    if not found:
        return None
    node = found[-1]
    return Source(
        file=file,
        line=node.lineno,
        fingerprint=fingerprint(node),
        end=node.end_lineno or node.lineno,
        decorators=sum(not _is_transparent(d) for d in node.decorator_list),
    )


@lru_cache(maxsize=32)
def _parse(file: Path, mtime_ns: int, size: int) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def find_definitions(tree: ast.Module, qualname: str) -> list[Definition]:
    """Return the definitions of `Qual.name` in a module, in the order in which they stand."""
    *path, last = qualname.split(".")
    bodies: list[list[ast.stmt]] = [tree.body]
    for name in path:
        bodies = [d.body for body in bodies for d in _definitions(body) if d.name == name]
    return [d for body in bodies for d in _definitions(body) if d.name == last]


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _is_transparent(decorator: ast.expr) -> bool:
    return getattr(decorator, "id", getattr(decorator, "attr", None)) in _TRANSPARENT


_BRANCHING = ast.If | ast.Try | ast.TryStar | ast.With | ast.ExceptHandler


def _definitions(body: list[ast.stmt]) -> list[Definition]:
    """Return what a body defines, looking into `if`, `try` and `with` as Python does."""
    found: list[Definition] = []
    for statement in body:
        if isinstance(statement, Definition):
            found.append(statement)
        for branch in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(statement, _BRANCHING):
                found += _definitions(getattr(statement, branch, []))
    return found


# Fields that say nothing about behaviour, or that only some Python versions have.
_IGNORED_FIELDS = frozenset(
    {"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "type_ignores"}
)


def fingerprint(node: ast.AST) -> str:
    """Return the normalised hash of a definition, 16 hexadecimal digits.

    Comments, formatting, docstrings and annotations do not enter it, and it is the same on every
    Python version.
    """
    return hashlib.sha256(_dump(node).encode()).hexdigest()[:16]


def _dump(value: object) -> str:
    # ast.dump prints other fields on other Python versions; this one skips what is empty.
    if isinstance(value, ast.AnnAssign) and value.value is not None:
        value = ast.Assign(targets=[value.target], value=value.value)
    if isinstance(value, ast.JoinedStr):  # Python 3.12 puts empty texts into some
        values = [v for v in value.values if not isinstance(v, ast.Constant) or v.value]
        value = ast.JoinedStr(values=values)
    if isinstance(value, ast.AST):
        fields = [
            f"{name}={_dump(field)}"
            for name, field in ast.iter_fields(value)
            if name not in _IGNORED_FIELDS and field is not None and field != []
        ]
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return "[" + ",".join(_dump(item) for item in value if not _says_nothing(item)) + "]"
    return ascii(value)  # repr follows the Unicode tables of the Python version


def _says_nothing(node: object) -> bool:
    # A bare string anywhere in a body has no effect, like a docstring; nor has `x: int`.
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def source_of(function: Any) -> Source | None:
    """Return the source of a live function from the file that its code names.

    Looks through what the function's own decorators wrapped, so a method under
    `@torch.inference_mode()` is found; returns None for anything that has no Python code.
    """
    inner = innermost(function)
    if not isinstance(inner, FunctionType):
        return None
    code = inner.__code__
    return source_in(Path(code.co_filename), code.co_qualname, code.co_firstlineno)


def innermost(function: Any) -> Any:
    """Return what a function wraps, through staticmethod, classmethod and `__wrapped__`."""
    return layers(function)[-1]


def layers(function: Any) -> list[Any]:
    """Return a function and what it wraps, from the outside in."""
    found = [function]
    while len(found) < 64:
        # By type(): a wrapt wrapper around a staticmethod answers for its `__func__`, too.
        if issubclass(type(function), staticmethod | classmethod | MethodType):
            function = function.__func__
        else:
            function = getattr(function, "__wrapped__", None)
        if function is None:
            break
        found.append(function)
    return found


def reaches(function: Any, layer: Any) -> bool:
    """Return whether a function is `layer`, or wraps it in a way that can be seen."""
    # `original = C.f` gives whoever patches after us a bound wrapper; its parent is ours.
    return any(
        found is layer or getattr(found, "_self_parent", None) is layer
        for found in layers(function)
    )


def whence(function: Any) -> str:
    """Name a live function for a message: `module.qualname (file:line)`."""
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    code = getattr(function, "__code__", None)
    wrapper = getattr(function, "_self_wrapper", None)
    if wrapper is not None:
        return f"a wrapt wrapper around it: {whence(wrapper)}"
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
