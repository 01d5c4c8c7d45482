"""Shadow mode: the original does all the work, whatever becomes of the comparison."""

import importlib
import json
import logging
import os

import numpy as np
import pytest
from unit.conftest import FORWARD, STEP

import ascend_opt
from ascend_opt import (
    NotApplicableError,
    ParameterError,
    Pass,
    control,
    difference,
    host_patch,
    shadow_of,
    traced_patch,
)
from ascend_opt.config import ENVIRONMENT
from ascend_opt.targets import Target, locate

FREE = "fakevllm.runner:free"
BOOM = "fakevllm.runner:Runner.boom"


def known(target):
    return {locate(Target.parse(target)).fingerprint: "plain"}


def adder(site, comparison=None, target=STEP, **facts):
    """Provide a pass that adds ten in active mode, and compares in shadow mode.

    Args:
        site: The fixture.
        comparison: The shadow method's body; by default one that predicts what upstream does.
        target: What it patches, besides `free`, which has no shadow method.
        facts: Of the class.
    """

    def compare(self, runner, args, kwargs):
        predicted = args[0] + 1
        result = yield
        return [difference("step", result, predicted)]

    def shadow(self, runner, args, kwargs):
        return (yield from (comparison or compare)(self, runner, args, kwargs))

    def work(self, wrapped, runner, args, kwargs):
        self.counters["steps"] += 1
        return wrapped(*args, **kwargs) + 10

    def also(self, wrapped, runner, args, kwargs):
        return wrapped(*args, **kwargs) + 100

    work, also = (
        host_patch(target, known=known(target))(work),
        host_patch(FREE, known=known(FREE))(also),
    )
    body = {
        "name": "adder",
        "origin": "test",
        "remove_when": "never",
        "__doc__": "Add ten.",
        "work": work,
        "also": also,
        "compare": shadow_of(work)(shadow),
        "applied": lambda self: "adds ten",
    }
    return site.provide(type("Adder", (Pass,), {**body, **facts}))


def state(name="adder"):
    return next(s for s in ascend_opt.status() if s.name == name)


def test_the_original_does_the_work_and_is_compared(site, runner):
    """The caller gets the original's result; each call is counted; nothing else is patched."""
    adder(site)
    original = vars(runner.Runner)["step"]

    status = ascend_opt.enable("adder", mode="shadow")

    assert (status.state, status.mode) == ("active", "shadow")
    assert status.state.shown(status.mode) == "active (shadow)"
    assert status.reason == "compared with the original, not used: adds ten"
    assert [runner.Runner().step(i) for i in range(3)] == [1, 2, 3]
    assert runner.free(5) == 5, "a patch without a shadow method is not applied"
    assert [t.patched for t in status.targets] == [True, False]
    assert state().counters == {"compared": 3}
    ascend_opt.disable("adder")
    assert vars(runner.Runner)["step"] is original


def test_a_difference_is_one_error_and_switches_the_pass_off(site, runner, caplog):
    """The log has expected and found, the pass is `failed`, the values are the original's."""

    def compare(self, runner, args, kwargs):
        result = yield
        wrong = result + (args[0] == 2)
        return [None, difference("step", [7, result], [7, wrong], lambda i: f"request-{i}")]

    adder(site, compare)
    ascend_opt.enable("adder", mode="shadow")
    original = vars(runner.Runner)["step"].__wrapped__

    assert [runner.Runner().step(i) for i in range(5)] == [1, 2, 3, 4, 5]

    found = state()
    assert found.state == "failed"
    line = "step (1 of 2 values): request-1 [1] expected 3, found 4"
    assert found.reason == f"in shadow, it differs from the original: {line}"
    assert found.counters == {"compared": 3, "differed": 1}
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].endswith(line)
    assert STEP in errors[0]
    assert vars(runner.Runner)["step"] is original, "and its patches are out"


def raises_before(self, runner, args, kwargs):
    raise RuntimeError("planted")
    yield


def raises_after(self, runner, args, kwargs):
    yield
    raise RuntimeError("planted")


def yields_twice(self, runner, args, kwargs):
    yield
    yield


def returns_a_number(self, runner, args, kwargs):
    yield
    return 5


@pytest.mark.parametrize(
    ("comparison", "words"),
    [
        (raises_before, "RuntimeError: planted"),
        (raises_after, "RuntimeError: planted"),
        (yields_twice, "yields more than once"),
        (returns_a_number, "TypeError"),
    ],
)
def test_an_error_of_the_comparison_never_reaches_the_caller(
    site, runner, caplog, comparison, words
):
    """Before or after the original: the pass is off, the original has run exactly once."""
    adder(site, comparison)
    ascend_opt.enable("adder", mode="shadow")

    assert [runner.Runner().step(i) for i in range(3)] == [1, 2, 3]

    assert state().state == "failed"
    assert words in state().reason
    assert caplog.text.count("failed in shadow mode") == 1


def test_an_error_of_its_own_fail_does_not_matter_either(site, runner):
    """What a pass does when it is switched off is not the engine's business."""

    def fail(self, reason):
        raise RuntimeError("second")

    adder(site, raises_after, fail=fail)
    ascend_opt.enable("adder", mode="shadow")

    assert runner.Runner().step(1) == 2
    assert "planted" in state().reason


@pytest.mark.parametrize("after", [True, False])
def test_what_was_not_compared_is_not_counted(site, runner, after):
    """A method that ends before its yield, or returns None, had nothing to compare."""

    def compare(self, runner, args, kwargs):
        self.counters["steps"] += 1
        if after:
            yield

    adder(site, compare)
    ascend_opt.enable("adder", mode="shadow")

    assert runner.Runner().step(1) == 2
    assert state().counters == {"steps": 1}


def test_an_error_of_the_original_is_the_callers(site, runner):
    """It passes through as it is, nothing is compared, and the pass stays on."""
    finished = []

    def compare(self, runner, args, kwargs):
        yield
        finished.append(True)

    adder(site, compare, target=BOOM)
    ascend_opt.enable("adder", mode="shadow")

    with pytest.raises(LookupError, match="no 3"):
        runner.Runner().boom(3)

    assert (state().state, finished) == ("active", [])


def test_enabling_again_switches_between_shadow_and_active(site, runner):
    """There and back; counters begin anew, and nothing is left of the mode before."""
    adder(site)
    ascend_opt.enable("adder", mode="shadow")
    assert runner.Runner().step(1) == 2

    assert ascend_opt.enable("adder").mode == "active"
    assert (runner.Runner().step(1), runner.free(1)) == (12, 101)
    assert state().counters == {"steps": 1}

    ascend_opt.enable("adder", mode="shadow")
    assert (runner.Runner().step(1), runner.free(1)) == (2, 1)
    assert state().counters == {"compared": 1}


def test_a_pass_that_differed_can_be_enabled_again(site, runner):
    """It starts afresh: that is the user's decision."""

    def compare(self, runner, args, kwargs):
        yield
        return ["differs" if args[0] == 1 else None]

    adder(site, compare)
    ascend_opt.enable("adder", mode="shadow")
    runner.Runner().step(1)
    assert state().state == "failed"

    ascend_opt.enable("adder", mode="shadow")
    runner.Runner().step(2)

    assert (state().state, state().counters) == ("active", {"compared": 1})


def test_enabled_restores_the_mode(site, runner):
    """The context manager gives back shadow mode, too."""
    adder(site)
    ascend_opt.enable("adder", mode="shadow")

    with ascend_opt.enabled("adder"):
        assert runner.Runner().step(1) == 12

    assert state().mode == "shadow"
    assert runner.Runner().step(1) == 2


def test_children_inherit_the_mode(site):
    """`enable` and `load_config` write it into the variable, and it reads back the same."""
    adder(site)
    ascend_opt.enable("adder", mode="shadow")
    assert json.loads(os.environ[ENVIRONMENT])["passes"] == {"adder": {"mode": "shadow"}}
    inherited = os.environ[ENVIRONMENT]
    control.reset()

    os.environ[ENVIRONMENT] = inherited
    control.read_environment()

    assert state().mode == "shadow"
    assert ascend_opt.load_config({"passes": {"adder": {"mode": "active"}}})[0].mode == "active"
    assert json.loads(os.environ[ENVIRONMENT])["passes"] == {"adder": {}}


def test_a_pass_that_cannot_shadow_says_which_can(site):
    """ParameterError names the pass, the option and those that can; nothing is enabled."""
    site.provide(adder(site), site.host(STEP))

    with pytest.raises(ParameterError, match=r"greeter: mode: .* cannot shadow; .* can: adder"):
        ascend_opt.enable("greeter", mode="shadow")
    with pytest.raises(ParameterError, match=r"found 'shade'; did you mean 'shadow'\?"):
        ascend_opt.enable("adder", mode="shade")

    assert {s.state for s in ascend_opt.status()} == {"off"}


def test_only_targets_with_a_shadow_method_can_be_chosen(site):
    """A choice that leaves nothing to compare is an error, not a pass that is silently idle."""
    adder(site)

    with pytest.raises(ParameterError, match=f"no target '{FREE}'"):
        ascend_opt.enable("adder", mode="shadow", targets=[FREE])


def test_a_release_with_nothing_to_compare_is_inapplicable(site, runner):
    """Where only patches without a shadow method apply, shadow mode says so."""

    class Partly(adder(site)):
        """Add, where it is not built in."""

        name = "partly"

    work, _ = Partly.patches
    object.__setattr__(work, "known", dict.fromkeys(work.known, "builtin"))
    site.provide(Partly)

    with pytest.raises(NotApplicableError, match="nothing to compare in this release"):
        ascend_opt.enable("partly", mode="shadow")
    assert ascend_opt.enable("partly").state == "active"


def test_the_compile_key_is_the_unpatched_one(site, runner):
    """In shadow mode nothing that torch.compile traces is changed, so no cache is split."""
    importlib.import_module("fakevllm.model")

    class Both(adder(site)):
        """Change the graph as well."""

        changes_graph = True

        @traced_patch(FORWARD, known=known(FORWARD))
        def forward(self, original):
            return lambda this, x: -original(this, x)

    site.provide(Both)
    model = importlib.import_module("fakevllm.model").Model()

    ascend_opt.enable("adder")
    assert (control.graph_fingerprint() is None, model.forward(1)) == (False, -10)
    ascend_opt.enable("adder", mode="shadow")
    assert (control.graph_fingerprint(), model.forward(1)) == (None, 10)


def test_explain_says_whether_a_pass_can_shadow(site, runner):
    """And in which mode it is."""
    site.provide(adder(site), site.host(STEP))
    ascend_opt.enable("adder", mode="shadow")

    found, other = ascend_opt.explain("adder"), ascend_opt.explain("greeter")

    assert (found.can_shadow, found.mode) == (True, "shadow")
    assert (other.can_shadow, other.mode) == (False, "active")


class TestDeclaration:
    """What `shadow_of` accepts."""

    def test_a_subclass_inherits_the_shadow(self, site):
        """An overridden patch keeps it; an overridden shadow takes its place."""

        class Child(adder(site)):
            """Add."""

            def compare(self, runner, args, kwargs):
                yield

        work, also = Child.patches
        assert (work.shadow, also.shadow) == ("compare", None)

    def test_one_method_may_shadow_several(self):
        """Each patch names it."""

        class Two(Pass):
            """Do two."""

            @host_patch("m:f", known={})
            def one(self, wrapped, instance, args, kwargs):
                pass

            @host_patch("m:g", known={})
            def two(self, wrapped, instance, args, kwargs):
                pass

            @shadow_of(one, two)
            def compare(self, instance, args, kwargs):
                yield

        assert [patch.shadow for patch in Two.patches] == ["compare", "compare"]

    def test_what_is_no_host_patch_cannot_be_shadowed(self):
        """A traced patch, or a method that patches nothing."""
        traced = traced_patch("m:f", known={})(lambda self, original: original)

        for other in (traced, print):
            with pytest.raises(TypeError, match="that host_patch has marked"):
                shadow_of(other)
        with pytest.raises(TypeError, match="that host_patch has marked"):
            shadow_of()

    def test_a_shadow_is_a_generator(self):
        """A plain method would never see what the original did."""
        marked = host_patch("m:f", known={})(lambda self, *args: None)

        with pytest.raises(TypeError, match="has to be a generator"):
            shadow_of(marked)(lambda self, *args: None)


class TestDifference:
    """One line of bounded length."""

    def test_equal_arrays(self):
        """Of any shape, NaNs included."""
        assert difference("x", np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3)) is None
        assert difference("x", np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) is None
        assert difference("x", [], []) is None
        assert difference("x", 3, 3) is None

    def test_where_rows_differ(self):
        """Row, label, both values."""
        found = difference("x", [1, 2, 3], [1, 5, 4], ["a", "b", "c"].__getitem__)
        assert found == "x (2 of 3 values): b [1] expected 2, found 5; c [2] expected 3, found 4"
        assert difference("x", 1, 2) == "x (1 of 1 values): expected 1, found 2"
        assert difference("x", [[1, 2]], [[1, 3]]) == (
            "x (1 of 2 values): [0, 1] expected 2, found 3"
        )
        assert difference("x", np.array([np.nan]), np.array([1.0])) is not None

    def test_another_shape_or_type(self):
        """Is a difference of its own."""
        assert difference("x", np.zeros(3, np.int32), np.zeros(2, np.int32)) == (
            "x: expected int32 of shape [3], found int32 of shape [2]"
        )
        assert difference("x", np.zeros(3, np.int32), np.zeros(3, np.int64)) is not None

    def test_the_length_is_bounded(self):
        """However many rows, and however long their labels."""
        found = difference("x", np.zeros(5000), np.ones(5000), lambda row: f"{row}" * 5000)
        assert found.endswith("; and 4992 more")
        assert len(found) < 1500
