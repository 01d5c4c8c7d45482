"""Applying the pass to a light release by the framework's own machinery."""

from __future__ import annotations

from ascend_opt.base import Pass
from ascend_opt.patching import Applied, apply
from ascend_opt.recognition import Action, Recognition
from ascend_opt.states import Mode
from ascend_opt.targets import source_in
from compat.light import Release
from compat.releases import module_file


def patch(release: Release, instance: Pass, mode: Mode = Mode.ACTIVE) -> list[Applied]:
    """Recognise the pass's targets in the release's files and patch its runner.

    Returns:
        What was applied, to be reverted one by one.
    """
    file = module_file(release.version, release.module.__name__)
    recognitions = []
    for target in instance.patches:
        source = source_in(file, target.target.qualname)
        if source is None:
            assert target.optional, f"{target.target} is missing"
            continue
        variant = target.known[source.fingerprint]
        instance.variants[str(target.target)] = variant
        if variant not in target.leave and target.applies_in(mode):
            recognitions.append(Recognition(target, source, variant, Action.PATCH))
    return [apply(instance, recognition, release.module, mode) for recognition in recognitions]
