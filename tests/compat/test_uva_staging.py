"""What uva-staging finds in each release."""

from __future__ import annotations

import pytest

from ascend_opt.recognition import judge, recognise_all
from ascend_opt.states import State
from ascend_opt.targets import Source, Target, source_in
from ascend_opt_passes.uva_staging import BUFFER, NUMPY_WRITE, TORCH_WRITE, UvaStaging
from compat.releases import RELEASES, module_file

BLOCKS = frozenset(RELEASES[: RELEASES.index("0.27.1rc1")])


@pytest.mark.parametrize("version", RELEASES)
def test_each_release_is_recognised(version: str) -> None:
    """Armed on every release: two writes are patched, the buffer is only known."""

    def find(target: Target) -> Source | None:
        return source_in(module_file(version, target.module), target.qualname)

    recognitions = recognise_all(UvaStaging, find)
    found = {str(r.patch.target): (r.variant, str(r.action)) for r in recognitions}
    assert found == {
        BUFFER: ("blocks" if version in BLOCKS else "queues", "leave"),
        NUMPY_WRITE: ("marks", "patch"),
        TORCH_WRITE: ("marks", "patch"),
    }
    assert judge(recognitions, allow_unknown=False).state is State.ARMED


@pytest.mark.parametrize("version", RELEASES)
def test_310p_has_the_worker_by_which_it_is_refused(version: str) -> None:
    """Each release runs 310P in a worker of the package that `Not310P` looks for."""
    file = module_file(version, "vllm_ascend._310p.worker_310p")
    assert source_in(file, "NPUWorker310") is not None
