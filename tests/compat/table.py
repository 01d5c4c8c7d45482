"""What each registered pass recognises in each release: table.yaml, and docs/compatibility.md.

    python -m compat.table            say what differs from the real packages; exit 1 if anything
    python -m compat.table --write    write table.yaml and docs/compatibility.md anew
    python -m compat.table --newest   the same with the newest releases that the registry has

`tox run -e compat-table -- OPTIONS` runs it. The releases are the keys of table.yaml; to take one
in, add its version there with an empty entry (`0.34.0: {}`), or give --newest --write. The part
`engine` is what the engine tests found on each vLLM; they check it, and nothing here writes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from ascend_opt import registry
from ascend_opt.base import Pass
from ascend_opt.compat.nearest import nearest
from ascend_opt.compat.sources import distribution_of, fetch, locate_in, versions
from ascend_opt.recognition import Action, judge, recognise
from ascend_opt.states import State
from ascend_opt.targets import Source, Target

FILE = Path(__file__).with_name("table.yaml")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- generated: tox run -e compat-table -- --write -->", "<!-- end -->"
HEADER = """\
# What each pass recognises in each release; `engine` is what the engine tests found.
# `tox run -e compat` checks it, `tox run -e compat-table -- --write` writes `releases` anew.
"""

Entry = dict[str, Any]
"""What a pass recognises in a release: `state`, `does`, and `targets`."""


def read() -> dict[str, Any]:
    """Return table.yaml."""
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def listed() -> list[tuple[str, str]]:
    """Return the distribution and version of every release in the table."""
    return [(name, version) for name, found in read()["releases"].items() for version in found]


def fetch_all(releases: list[tuple[str, str]]) -> None:
    """Get the source of releases, several at a time."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda release: fetch(*release), releases))


def measure(distribution: str, root: Path) -> dict[str, Entry]:
    """Return pass name to what it recognises of a distribution in a directory of packages."""
    classes = registry.discover().classes()
    entries = {name: _entry(classes[name], distribution, root) for name in sorted(classes)}
    return {name: entry for name, entry in entries.items() if entry}


def _entry(cls: type[Pass], distribution: str, root: Path) -> Entry:
    patches = [p for p in cls.patches if distribution_of(p.target) == distribution]
    found = [recognise(patch, partial(locate_in, root)) for patch in patches]
    if not found:
        return {}
    verdict = judge(found, allow_unknown=False)
    instance = cls()
    instance.variants = {str(r.patch.target): r.variant for r in found if r.variant}
    targets = {}
    for item in found:
        if item.source is None:
            shown = "missing" if item.action is Action.MISSING else "absent"
        elif item.variant is None:
            shown = f"unknown: hash {item.source.fingerprint}"
        else:
            shown = f"{item.variant} {item.source.fingerprint} {item.action}"
        targets[str(item.patch.target)] = shown
    on = verdict.state is State.ARMED
    return {
        "state": str(verdict.state),
        "does": instance.applied() if on else verdict.reason.partition(" (sha")[0],
        "targets": targets,
    }


def differences(
    distribution: str, version: str, root: Path, expected: dict[str, Entry]
) -> list[str]:
    """Return what differs between an entry of the table and a release's source; empty if nothing.

    Each line names the release, the pass and the target, with what the table says and what was
    found; an unknown source comes with the diff from the nearest known one.
    """
    found = measure(distribution, root)
    lines = []
    for name in sorted({*expected, *found}):
        old, new = expected.get(name, {}), found.get(name, {})
        flat_old = {**old, **old.get("targets", {})}
        flat_new = {**new, **new.get("targets", {})}
        for key in dict.fromkeys([*flat_old, *flat_new]):
            said, is_now = flat_old.get(key, "nothing"), flat_new.get(key, "nothing")
            if key != "targets" and said != is_now:
                lines.append(
                    f"{distribution} {version}, {name}, {key}: the table says {said!r}, "
                    f"the release {is_now!r}"
                )
        lines += _unknown(name, distribution, root)
    return lines


def _unknown(name: str, distribution: str, root: Path) -> Iterator[str]:
    """Show each unknown target of a pass beside the nearest known source of all releases."""
    for patch in registry.discover().classes()[name].patches:
        source = locate_in(root, patch.target)
        if distribution_of(patch.target) != distribution or source is None:
            continue
        if source.fingerprint in patch.known:
            continue
        known = nearest(patch, source, _sources(distribution, patch.target))
        yield f"{patch.target} unknown: hash {source.fingerprint}, {source}"
        yield known.diff if known else "and no release of the table holds a source that is known"


def _sources(distribution: str, target: Target) -> Iterator[tuple[str, Source]]:
    for version in reversed(list(read()["releases"][distribution])):
        source = locate_in(fetch(distribution, version), target)
        if source is not None:
            yield f"{distribution} {version}", source


def newest() -> dict[str, str]:
    """Return distribution to the newest release that the registry has."""
    return {distribution: versions(distribution)[0] for distribution in read()["releases"]}


def tables(data: dict[str, Any]) -> str:
    """Return the generated part of docs/compatibility.md."""
    blocks = [
        _table(distribution, name, releases)
        for distribution, releases in data["releases"].items()
        for name in sorted({name for entries in releases.values() for name in entries})
    ]
    blocks.append(_engine(data["engine"]))
    return "\n\n".join(blocks)


def _table(distribution: str, name: str, releases: dict[str, dict[str, Entry]]) -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    columns: dict[str, None] = {}
    for entries in releases.values():
        columns |= dict.fromkeys(entries.get(name, {}).get("targets", {}))
    for version, entries in releases.items():
        if name not in entries:
            continue
        entry = entries[name]
        variants = (_variant(entry["targets"].get(target, "absent")) for target in columns)
        rows.setdefault((entry["state"], *variants, entry["does"]), []).append(version)
    names = [target.partition(":")[2] for target in columns]
    lines = [
        f"### {name} on {distribution}",
        "",
        _row([distribution, "state", *(f"`{n}`" for n in names), "what the pass does"]),
        _row(["---"] * (len(columns) + 3)),
        *(_row([", ".join(found), *cells]) for cells, found in rows.items()),
    ]
    return "\n".join(lines)


def _variant(text: str) -> str:
    """Return how a target is shown to readers: its variant, and what becomes of it."""
    if text.startswith(("unknown", "missing", "absent")):
        return text
    variant, _, action = text.rsplit(" ", 2)
    return variant if action == Action.PATCH else f"{variant} ({action})"


def _engine(runs: dict[str, Any]) -> str:
    headings = ["vLLM", "environment", "prefetches a step", "bytes a step", "result"]
    rows = (
        [
            version,
            f"`tox run -e {run['environment']}`",
            str(run["prefetches_a_step"]),
            str(run["bytes_a_step"]),
            run["result"],
        ]
        for version, run in runs.items()
    )
    lines = ["### Engines that ran", "", _row(headings), _row(["---"] * 5), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def page(text: str, data: dict[str, Any]) -> str:
    """Return docs/compatibility.md with its generated part made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(data)}\n\n{END}{after}"


def main() -> int:
    """Compare, or write; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the files anew")
    parser.add_argument("--newest", action="store_true", help="with the registry's newest releases")
    options = parser.parse_args()
    data = read()
    if options.newest:
        for distribution, version in newest().items():
            data["releases"][distribution].setdefault(version, {})
    releases = data["releases"]
    fetch_all([(name, version) for name, found in releases.items() for version in found])
    lines: list[str] = []
    for distribution, found in releases.items():
        for version, expected in found.items():
            lines += differences(distribution, version, fetch(distribution, version), expected)
    print("\n".join(lines) if lines else "table.yaml says what the releases hold")
    if not options.write:
        return 1 if lines else 0
    for distribution, found in releases.items():
        data["releases"][distribution] = {
            version: measure(distribution, fetch(distribution, version))
            for version in sorted(found, key=Version)
        }
    text = yaml.safe_dump(data, sort_keys=False, width=200)
    FILE.write_text(HEADER + text, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")
    print(f"wrote {FILE} and {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
