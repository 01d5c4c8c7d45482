"""An unknown source beside the most similar one that is known."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher, unified_diff

from ascend_opt.base import Patch
from ascend_opt.targets import Source


@dataclass(frozen=True)
class Nearest:
    """The known source that an unknown one is most similar to.

    Attributes:
        release: Where it is from, such as `vllm 0.32.0`.
        variant: What the pass calls it.
        similarity: Share of equal lines, 0 to 1.
        diff: Unified diff from it to the unknown source, both normalised.
    """

    release: str
    variant: str
    similarity: float
    diff: str


def nearest(patch: Patch, source: Source, releases: Iterable[tuple[str, Source]]) -> Nearest | None:
    """Return the most similar of the sources that a patch knows; None if it knows none of them.

    Args:
        patch: Its `known` says which sources count.
        source: The unknown source.
        releases: Names of releases, nearest first, with the same target's source in each.
    """
    ours = normalised(source)
    best: Nearest | None = None
    for release, other in releases:
        variant = patch.known.get(other.fingerprint)
        if variant is None:
            continue
        theirs = normalised(other)
        similarity = SequenceMatcher(None, theirs, ours, autojunk=False).ratio()
        if best is None or similarity > best.similarity:
            named = (f"{release} ({variant} {other.fingerprint})", f"unknown {source.fingerprint}")
            diff = "\n".join(unified_diff(theirs, ours, *named, lineterm=""))
            best = Nearest(release, variant, similarity, diff)
    return best


def normalised(source: Source) -> list[str]:
    """Return the lines of a source without what its fingerprint leaves out.

    Comments, formatting, docstrings and annotations are gone, so each line that differs counts.
    """
    tree = _Bare().visit(ast.parse(textwrap.dedent(source.text)))
    return ast.unparse(ast.fix_missing_locations(tree)).splitlines()


class _Bare(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        says = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if says else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return self.generic_visit(ast.Assign(targets=[node.target], value=node.value))

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.body = node.body or [ast.Pass()]
        return node
