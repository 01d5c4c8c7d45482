"""What each release is recognised as, and what the pass then does there."""

from __future__ import annotations

import pytest

from ascend_opt.recognition import judge, recognise_all
from ascend_opt.states import State
from ascend_opt.targets import source_in
from ascend_opt_passes.sync_elision import COPY, POSTPROCESS, UPDATE, SyncElision
from compat.releases import RELEASES, module_file, source

# Release: variant of _update_seq_lens_cpu, of _copy_num_computed_tokens_to_cpu, of postprocess.
EXPECTED = {
    "0.18.0": ("waits", None, "copies"),
    "0.19.1rc1": ("waits", None, "copies"),
    "0.20.2rc1": ("waits", None, "copies"),
    "0.21.0rc1": ("waits", "copies", "calls"),
    "0.22.1rc1": ("waits", "copies", "calls"),
    "0.23.0": ("waits", "copies", "calls"),
    "0.23.0.post1": ("waits", "copies", "calls"),
    "0.24.0rc1": ("waits", "copies", "calls"),
    "0.25.1rc1": ("waits", "copies", "calls"),
    "0.26.0rc1": ("waits", "copies", "calls"),
    "0.27.1rc1": ("mirrors", "copies", None),
    "0.28.0rc1": ("shares", "copies", None),
    "0.29.0rc1": ("shares", "copies", None),
    "0.30.0rc1": ("shares", "copies", None),
    "0.30.0rc2": ("shares", "copies", None),
}
PATCHED = {
    "waits": {"copies": {UPDATE, COPY}, None: {UPDATE, POSTPROCESS}},
    "mirrors": {"copies": {UPDATE, COPY}},
    "shares": {"copies": {UPDATE, COPY}},
}


@pytest.mark.parametrize("version", RELEASES)
def test_each_release_is_recognised(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every release the pass is armed, with the variants of this table and no other."""
    monkeypatch.syspath_prepend(source(version))
    recognitions = recognise_all(SyncElision)
    found = {str(r.patch.target): r for r in recognitions}
    assert tuple(found[t].variant for t in (UPDATE, COPY, POSTPROCESS)) == EXPECTED[version]
    assert judge(recognitions, allow_unknown=False).state is State.ARMED
    update, copy, _ = EXPECTED[version]
    assert {t for t, r in found.items() if r.action == "patch"} == PATCHED[update][copy]


def test_the_status_says_which_of_the_two_it_does() -> None:
    """Where upstream waits we elide; where it elides itself, only the loop is replaced."""
    instance = SyncElision()
    instance.variants = {UPDATE: "waits"}
    assert "elides the copy and the wait" in instance.applied()
    instance.variants = {UPDATE: "shares"}
    assert "this release elides the wait itself" in instance.applied()


@pytest.mark.parametrize("version", RELEASES)
def test_the_310p_runner_never_meets_our_method_where_it_has_its_own(version: str) -> None:
    """310P overrides the method from 0.28.0rc1 on, with source that we neither know nor touch."""
    file = module_file(version, "vllm_ascend._310p.worker.v2.model_runner")
    own = source_in(file, "NPUModelRunner310V2._update_seq_lens_cpu")
    assert (own is not None) == (version in ("0.28.0rc1", "0.29.0rc1", "0.30.0rc1", "0.30.0rc2"))
    known = {fingerprint for patch in SyncElision.patches for fingerprint in patch.known}
    assert own is None or own.fingerprint not in known
