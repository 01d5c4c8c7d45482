"""The table against the real releases: what each is recognised as, and what the pass does there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ascend_opt import registry
from ascend_opt.compat.sources import fetch
from ascend_opt.targets import source_in
from ascend_opt_passes.sync_elision import UPDATE, SyncElision
from compat import table
from compat.releases import RELEASES, module_file

RUNNER = "vllm_ascend/worker/v2/model_runner.py"


@pytest.mark.parametrize(("distribution", "version"), table.listed())
def test_each_release_is_what_the_table_says(distribution: str, version: str) -> None:
    """Recognised anew from the real package, every pass and target is as in table.yaml."""
    expected = table.read()["releases"][distribution][version]
    assert expected
    found = table.differences(distribution, version, fetch(distribution, version), expected)
    assert not found, "\n".join(found)


def test_the_table_has_every_registered_pass() -> None:
    """A pass that is not in the table has no promise: its author writes the table anew."""
    entries = [entry for found in table.read()["releases"].values() for entry in found.values()]
    assert {name for entry in entries for name in entry} == set(registry.discover().classes())


def test_the_page_is_made_from_the_table() -> None:
    """docs/compatibility.md holds what table.yaml says."""
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(text, table.read()), "run `tox run -e compat-table -- --write`"


def test_the_newest_releases_are_in_the_table() -> None:
    """A release that came out since is shown with what changed in it; that is no fault of ours."""
    late = []
    for distribution, version in table.newest().items():
        if version not in table.read()["releases"][distribution]:
            late.append(f"{distribution} {version} is not in the table yet: see compat-table")
            late += table.differences(distribution, version, fetch(distribution, version), {})
    if late:
        pytest.skip("\n".join(late))


def test_an_unknown_release_shows_its_hash_and_the_diff(tmp_path: Path) -> None:
    """One changed line in the newest release: unknown, its hash, and that line beside the known."""
    version = RELEASES[-1]
    file = tmp_path / RUNNER
    file.parent.mkdir(parents=True)
    shutil.copy(fetch("vllm-ascend", version) / RUNNER, file)
    source = source_in(file, UPDATE.partition(":")[2])
    assert source is not None
    lines = file.read_text().split("\n")
    lines.insert(source.end, "        self.planted = 1")
    file.write_text("\n".join(lines))
    changed = source_in(file, UPDATE.partition(":")[2])
    assert changed is not None

    expected = {"sync-elision": table.read()["releases"]["vllm-ascend"][version]["sync-elision"]}
    said = "\n".join(table.differences("vllm-ascend", version, tmp_path, expected))
    assert f"unknown: hash {changed.fingerprint}" in said
    assert "the table says 'armed', the release 'inapplicable'" in said
    assert f"--- vllm-ascend {version} (shares {source.fingerprint})" in said
    added = [x for x in said.splitlines() if x.startswith("+") and not x.startswith("+++")]
    assert added == ["+    self.planted = 1"]


@pytest.mark.parametrize("version", RELEASES)
def test_the_310p_runner_never_meets_our_method_where_it_has_its_own(version: str) -> None:
    """310P overrides the method from 0.28.0rc1 on, with source that we neither know nor touch."""
    file = module_file(version, "vllm_ascend._310p.worker.v2.model_runner")
    own = source_in(file, "NPUModelRunner310V2._update_seq_lens_cpu")
    assert (own is not None) == (version in ("0.28.0rc1", "0.29.0rc1", "0.30.0rc1", "0.30.0rc2"))
    known = {fingerprint for patch in SyncElision.patches for fingerprint in patch.known}
    assert own is None or own.fingerprint not in known
