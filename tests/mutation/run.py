"""Change one module in many small ways and list the changes that its tests do not notice.

    python tests/mutation/run.py patching           all mutants of ascend_opt/patching.py
    python tests/mutation/run.py patching --again   what has not run yet, and what survived

cosmic-ray makes the mutants, in a copy of the checkout. Annotations are left alone, since nobody
evaluates them, and no `is` becomes an order, since nobody makes that mistake. Results are kept in
`.tox/mutation-results`; a run that was stopped goes on with `--again`. It fails if a mutant
survives whose changed line docs/testing.md does not explain.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / ".tox" / "mutation-results"
COPIED = ("ascend_opt", "passes", "tests", "configs", "docs", "pyproject.toml")

IS_AS_ORDER = re.compile(r"core/ReplaceComparisonOperator_Is(Not)?_[GL].*")

Position = tuple[int, int]


def main() -> int:
    modules = tomllib.loads((HERE / "modules.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", nargs="+", choices=sorted(modules))
    parser.add_argument("--again", action="store_true", help="go on; repeat only the survivors")
    parser.add_argument("--seconds", type=float, help="stop after this time; --again goes on")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds if options.seconds else float("inf")
    RESULTS.mkdir(parents=True, exist_ok=True)
    left = 0
    for name in options.module:
        with use_db(RESULTS / f"{name}.sqlite") as results, tempfile.TemporaryDirectory() as copy:
            begin(results, Path(copy), modules[name]["path"], options.again)
            run(results, modules[name]["tests"], until)
            left += report(name, results)
    return 1 if left else 0


def begin(results: WorkDB, copy: Path, path: str, again: bool) -> None:
    """Copy the checkout, be in the copy, and know which mutants are to run."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(copy), str(copy / "passes")))
    if not again:
        init([Path(path)], results, {})
        ranges = list(annotations(ast.parse(Path(path).read_text())))
        for item in results.pending_work_items:
            (mutation,) = item.mutations
            if within(mutation, ranges) or IS_AS_ORDER.fullmatch(mutation.operator_name):
                results.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED))


def annotations(tree: ast.AST) -> Iterator[tuple[Position, Position]]:
    """Yield where the annotations of a module begin and end."""
    for node in ast.walk(tree):
        for kind in ("annotation", "returns"):
            found = getattr(node, kind, None)
            if found is not None:
                yield (found.lineno, found.col_offset), (found.end_lineno, found.end_col_offset)


def within(mutation: MutationSpec, ranges: list[tuple[Position, Position]]) -> bool:
    start, end = tuple(mutation.start_pos), tuple(mutation.end_pos)
    return any(first <= start and end <= last for first, last in ranges)


def run(results: WorkDB, tests: list[str], until: float) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the tests fail on what is to be mutated:\n{done.stdout}{done.stderr}")
    timeout = 10 + 5 * (time.monotonic() - began)
    finished = {
        job
        for job, result in results.results
        if result.worker_outcome is WorkerOutcome.SKIPPED or result.is_killed
    }
    for item in results.work_items:
        if item.job_id not in finished and time.monotonic() < until:
            result = mutate_and_test(item.mutations, shlex.join(command), timeout)
            results.set_result(item.job_id, result)


def report(name: str, results: WorkDB) -> int:
    """Print what became of the mutants; return how many are to be explained or still to run."""
    explained = (ROOT / "docs" / "testing.md").read_text().replace("\\|", "|")
    counts: Counter[str] = Counter()
    survivors = []
    for item, result in results.completed_work_items:
        what = result.worker_outcome.value
        if result.worker_outcome is WorkerOutcome.NORMAL:
            what = result.test_outcome.value
        if result.test_outcome is TestOutcome.SURVIVED:
            (mutation,) = item.mutations
            removed, added = changed(result.diff)
            if f"`{added}`" in explained:
                what = "survived and explained"
            else:
                survivors.append((mutation.start_pos, mutation.definition_name, removed, added))
        counts[what] += 1
    pending = len(results.pending_work_items)
    print(f"{name}: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}", end="")
    print(f", {pending} still to run" if pending else "")
    for (line, _), function, removed, added in sorted(survivors):
        print(f"  line {line}, {function}\n    - {removed}\n    + {added}")
    return len(survivors) + pending


def changed(diff: str) -> tuple[str, str]:
    """Return what a mutant takes out and what it puts in, each as one line."""
    body = [line for line in diff.split("\n") if line[:3] not in ("---", "+++")]
    removed, added = (
        " ".join(line[1:].strip() for line in body if line.startswith(sign)) for sign in "-+"
    )
    return removed, added


if __name__ == "__main__":
    sys.exit(main())
