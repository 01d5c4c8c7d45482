"""Recognition: all targets are judged before the first is touched."""

import sys

import pytest
from unit.conftest import FORWARD, STEP

from ascend_opt.recognition import Action, judge, recognise_all

FREE = "fakevllm.runner:free"


@pytest.mark.parametrize(
    ("variant", "options", "action"),
    [
        ("plain", {}, Action.PATCH),
        ("builtin", {}, Action.BUILTIN),
        ("old", {"leave": frozenset({"old"})}, Action.LEAVE),
    ],
)
def test_a_known_source_gives_its_variants_action(site, variant, options, action):
    """patch, builtin or leave."""
    cls = site.host(STEP, known=site.known(STEP, variant), **options)

    (found,) = recognise_all(cls)

    assert (found.action, found.variant) == (action, variant)
    assert "fakevllm" not in sys.modules


@pytest.mark.parametrize(("optional", "action"), [(False, Action.MISSING), (True, Action.LEAVE)])
def test_a_missing_target(site, optional, action):
    """Is an obstacle unless it is optional."""
    (found,) = recognise_all(site.host("fakevllm.x:f", known={"a": "b"}, optional=optional))

    assert found.action is action


def judged(site, *variants, allow_unknown=False, **options):
    known = {}
    for target, variant in zip((STEP, FREE, FORWARD), variants, strict=False):
        known |= site.known(target, variant) if variant else {}
    cls = site.host(*(STEP, FREE, FORWARD)[: len(variants)], known=known or {"0": "x"}, **options)
    return judge(recognise_all(cls), allow_unknown=allow_unknown)


@pytest.mark.parametrize(
    ("variants", "state"),
    [
        (["plain", "plain"], "armed"),
        (["plain", "builtin"], "armed"),
        (["builtin", "builtin"], "builtin"),
        (["builtin", "old"], "builtin"),
        (["old", "old"], "inapplicable"),
        (["plain", None], "inapplicable"),
        (["builtin", None], "inapplicable"),
    ],
)
def test_the_verdict_over_several_targets(site, variants, state):
    """One unknown is enough to refuse; builtin only if nothing is left to patch."""
    assert judged(site, *variants, leave=frozenset({"old"})).state == state


def test_the_verdict_on_unknown_source_gives_hash_file_and_line(site):
    """Enough to look at it and to add it to `known`."""
    verdict = judged(site, None)

    (sha,) = site.known(STEP)
    path = site.directory / "fakevllm/runner.py"
    assert verdict.reason == f"unknown source of {STEP} (sha {sha}, {path}:6)"


@pytest.mark.parametrize(("known", "state"), [(None, "armed"), ("builtin", "builtin")])
def test_unknown_source_may_be_allowed(site, known, state):
    """Then it counts as something to patch; what is known keeps its verdict."""
    assert judged(site, known, allow_unknown=True).state == state


def test_a_missing_target_is_an_obstacle_whatever_is_allowed(site):
    """There is nothing to patch, unknown or not; the reason names it."""
    cls = site.host("fakevllm.runner:Runner.gone", known={"a": "b"})

    verdict = judge(recognise_all(cls), allow_unknown=True)

    assert verdict.state == "inapplicable"
    assert verdict.reason == "fakevllm.runner:Runner.gone is not there"


def test_the_report_on_a_missing_target_has_no_place(site):
    """Nothing was found, and nothing is made up."""
    (found,) = recognise_all(site.host("fakevllm.runner:Runner.gone", known={"a": "b"}))
    report = found.report()

    assert (report.file, report.line, report.fingerprint) == (None, None, None)
    assert report.action == "missing"


def test_a_changed_comment_is_still_recognised(site):
    """The file changed, the code did not; a change of code is seen at once."""
    cls = site.host(STEP)
    path = site.directory / "fakevllm/runner.py"
    text = path.read_text()
    path.write_text(text.replace("return x + 1", "return x + 1  # one more"))
    assert recognise_all(cls)[0].action is Action.PATCH
    path.write_text(text.replace("return x + 1", "return x + 22"))

    assert recognise_all(cls)[0].action is Action.UNKNOWN


def test_the_report_says_where(site):
    """File, line, hash and action, as `explain` shows them."""
    (found,) = recognise_all(site.host(STEP))
    report = found.report()

    assert report.file == str(site.directory / "fakevllm/runner.py")
    assert [report.fingerprint] == list(site.known(STEP))
    assert (report.line, report.kind, report.variant, report.action) == (
        6,
        "host",
        "plain",
        "patch",
    )
