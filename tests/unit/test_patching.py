"""Patches go in and come out: exactly the original, and never someone else's."""

import functools
import importlib

import pytest
import wrapt
from unit.conftest import FORWARD, STEP

import ascend_opt
from ascend_opt import RevertError

SCALE = "fakevllm.runner:Runner.scale"
MAKE = "fakevllm.runner:Runner.make"
FREE = "fakevllm.runner:free"
BOOM = "fakevllm.runner:Runner.boom"


def state(name="greeter"):
    return next(s for s in ascend_opt.status() if s.name == name)


@pytest.mark.parametrize("target", [STEP, SCALE, MAKE, FREE])
def test_disable_gives_back_exactly_the_original_object(site, runner, target):
    """Methods, static and class methods and functions: what stands in `vars` is the same object."""
    *path, attribute = target.partition(":")[2].split(".")
    owner = runner.Runner if path else runner
    original = vars(owner)[attribute]
    site.provide(site.host(target))

    ascend_opt.enable("greeter")
    assert vars(owner)[attribute] is not original
    ascend_opt.disable("greeter")

    assert vars(owner)[attribute] is original


@pytest.mark.parametrize(
    ("target", "call", "expected"),
    [
        (STEP, lambda m: m.Runner().step(1), 2),
        (SCALE, lambda m: m.Runner.scale(2), 4),
        (MAKE, lambda m: m.Child.make(), "Child"),
        (FREE, lambda m: m.free(5), 5),
        (STEP, lambda m: m.Child().step(1), 2),
    ],
    ids=["method", "staticmethod", "classmethod", "function", "inherited"],
)
def test_a_host_patch_is_called_around_the_original(site, runner, target, call, expected):
    """The wrapper gets the call, and `wrapped` is the original, bound."""
    site.provide(site.host(target))

    ascend_opt.enable("greeter")

    assert call(runner) == ("patched", expected)
    assert state().counters == {"steps": 1}


def test_a_patch_on_a_base_class_leaves_nothing_on_its_subclass(site, runner):
    """An inherited method is patched and reverted where it is defined."""
    site.provide(site.host(STEP))

    ascend_opt.enable("greeter")
    ascend_opt.disable("greeter")

    assert "step" not in vars(runner.Child)


def test_a_traced_patch_is_a_plain_function(site):
    """torch.compile bypasses wrappers: what stands at the target is a function, named like it."""
    model = importlib.import_module("fakevllm.model")
    original = vars(model.Model)["forward"]

    def make(self, original):
        return lambda this, x: ("traced", original(this, x))

    site.provide(site.traced(FORWARD, make))
    ascend_opt.enable("tracer")

    installed = vars(model.Model)["forward"]
    assert type(installed) is type(original)
    assert installed.__qualname__ == "Model.forward"
    assert model.Model().forward(2) == ("traced", 20)
    ascend_opt.disable("tracer")
    assert vars(model.Model)["forward"] is original


@pytest.mark.parametrize(
    ("target", "arguments", "expected"), [(SCALE, (2,), 4), (MAKE, (), "Child")]
)
def test_a_traced_patch_leaves_a_static_or_class_method_one(
    site, runner, target, arguments, expected
):
    """The pass gets and makes the plain function; what stands in the class binds as before."""
    name = target.rpartition(".")[2]
    original = vars(runner.Runner)[name]

    def make(self, inner):
        assert inner is original.__func__
        return lambda *args: ("traced", inner(*args))

    site.provide(site.traced(target, make))
    ascend_opt.enable("tracer")

    assert type(vars(runner.Runner)[name]) is type(original)
    assert getattr(runner.Child(), name)(*arguments) == ("traced", expected)
    ascend_opt.disable("tracer")
    assert vars(runner.Runner)[name] is original


def test_a_traced_patch_that_names_what_it_wraps_is_left_as_it_is(site):
    """A function that already has `__wrapped__` keeps its own name and attributes."""

    def make(self, original):
        def mine(this, x):
            return original(this, x)

        mine.__wrapped__ = original
        return mine

    site.provide(site.traced(FORWARD, make))
    ascend_opt.enable("tracer")

    assert vars(importlib.import_module("fakevllm.model").Model)["forward"].__name__ == "mine"


def test_a_traced_patch_that_makes_no_function_is_refused(site):
    """A class, a wrapper or None in the target's place would not be traced: `failed`, unpatched."""
    model = importlib.import_module("fakevllm.model")
    original = vars(model.Model)["forward"]
    site.provide(site.traced(FORWARD, lambda self, original: functools.partial(original)))

    with pytest.raises(ascend_opt.NotApplicableError, match="made partial, expected a plain"):
        ascend_opt.enable("tracer")

    assert vars(model.Model)["forward"] is original


@pytest.mark.parametrize("error", [RuntimeError("bad"), KeyError("bad")])
def test_a_pass_that_fails_while_it_patches_is_failed_and_leaves_nothing(site, error):
    """Whatever its method raises, the targets patched before it are reverted."""
    model = importlib.import_module("fakevllm.model")
    runner = importlib.import_module("fakevllm.runner")
    step, forward = vars(runner.Runner)["step"], vars(model.Model)["forward"]

    def make(self, original):
        raise error

    # fakevllm.model is patched before fakevllm.runner.
    bases = (site.host(FORWARD), site.traced(STEP, make))
    both = type("Both", bases, {"name": "both", "__doc__": "Do both."})
    site.provide(both)

    with pytest.raises(
        ascend_opt.NotApplicableError, match=r"both is failed: .*could not make its function: .*bad"
    ):
        ascend_opt.enable("both")

    assert vars(runner.Runner)["step"] is step
    assert vars(model.Model)["forward"] is forward


def foreign_wrapt(owner, name):
    wrapt.wrap_function_wrapper(owner, name, lambda w, i, a, k: w(*a, **k))


def foreign_wraps(owner, name):
    original = getattr(owner, name)

    @functools.wraps(original)
    def closure(*args):
        return original(*args)

    setattr(owner, name, closure)


def foreign_closure(owner, name):
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: original(*args))


def foreign_assignment(owner, name):
    setattr(owner, name, wait_for_nothing)


def wait_for_nothing(*args):
    return "other"


FOREIGN = [foreign_wrapt, foreign_wraps, foreign_closure, foreign_assignment]


@pytest.mark.parametrize("target", [STEP, SCALE], ids=["method", "staticmethod"])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_patch_that_came_first_is_a_conflict(site, runner, foreign, target):
    """We neither cover nor lose it: state `conflict`, naming who is there; the object stays."""
    name = target.rpartition(".")[2]
    foreign(runner.Runner, name)
    theirs = vars(runner.Runner)[name]
    site.provide(site.host(target))

    with pytest.raises(ascend_opt.NotApplicableError, match=r"conflict: .*test_patching"):
        ascend_opt.enable("greeter")

    assert vars(runner.Runner)[name] is theirs


def test_a_foreign_patch_that_came_and_went_is_no_conflict(site, runner):
    """A patch that was taken out again leaves the original, which is recognised."""
    original = vars(runner.Runner)["step"]
    foreign_wraps(runner.Runner, "step")
    runner.Runner.step = original
    site.provide(site.host(STEP))

    assert ascend_opt.enable("greeter").state == "active"


def test_a_foreign_patch_on_a_decorated_target_is_a_conflict(site):
    """A target's own decorator does not hide a wrapper around it, whether it wraps or marks."""
    site.write(
        "fakevllm/marked.py",
        """
        from typing import final
        class C:
            @final
            def f(self): return 1
        """,
    )
    module = importlib.import_module("fakevllm.marked")
    foreign_wraps(module.C, "f")
    site.provide(site.host("fakevllm.marked:C.f"))

    with pytest.raises(ascend_opt.NotApplicableError, match="conflict"):
        ascend_opt.enable("greeter")


def test_a_foreign_wrapper_on_a_wrapped_target_is_a_conflict(site):
    """One layer is the target's own decorator, and the second is somebody's."""
    site.write(
        "fakevllm/cached.py",
        """
        import functools
        class C:
            @functools.cache
            def f(self): return 1
        """,
    )
    module = importlib.import_module("fakevllm.cached")
    foreign_wraps(module.C, "f")
    site.provide(site.host("fakevllm.cached:C.f"))

    with pytest.raises(ascend_opt.NotApplicableError, match=r"conflict: .* already patched"):
        ascend_opt.enable("greeter")


@pytest.mark.parametrize("decorator", ["final", "mark"])
def test_a_decorator_that_only_marks_is_no_conflict(site, decorator):
    """It gives the function back, so fewer layers stand there than decorators in the source."""
    site.write(
        "fakevllm/marked.py",
        f"""
        from typing import final
        def mark(function):
            function.marked = True
            return function
        class C:
            @{decorator}
            def f(self): return 1
        """,
    )
    module = importlib.import_module("fakevllm.marked")
    site.provide(site.host("fakevllm.marked:C.f"))

    ascend_opt.enable("greeter")

    assert module.C().f() == ("patched", 1)


def test_something_without_python_code_in_its_place_is_a_conflict(site, runner):
    """A builtin has no source to recognise, and is named."""
    runner.Runner.step = abs
    site.provide(site.host(STEP))

    with pytest.raises(ascend_opt.NotApplicableError, match=r"already patched by builtins\.abs"):
        ascend_opt.enable("greeter")


@pytest.mark.parametrize(("owner", "name"), [("Runner", "step"), (None, "Runner")])
def test_a_target_that_was_deleted_is_missing_and_nothing_breaks(site, runner, owner, name):
    """It is in the file, and not in the module that was imported: `failed`, naming the target."""
    delattr(getattr(runner, owner) if owner else runner, name)
    site.provide(site.host(STEP))

    with pytest.raises(
        ascend_opt.NotApplicableError, match=r"Runner\.step is in the source but not in the"
    ):
        ascend_opt.enable("greeter")


def test_a_traced_patch_on_a_target_with_a_host_patch_of_ours_conflicts(site, runner):
    """torch.compile would trace the original under the wrapper, and lose the host patch."""
    site.provide(
        site.host(STEP), site.traced(STEP, lambda self, original: lambda this, x: original(this, x))
    )
    ascend_opt.enable("greeter")

    with pytest.raises(ascend_opt.NotApplicableError, match="tracer is conflict"):
        ascend_opt.enable("tracer")

    assert runner.Runner().step(1) == ("patched", 2)


def test_a_decorated_target_is_patched_around_its_decorator(site):
    """Its own `functools.wraps` decorator is part of it, and no conflict."""
    site.write(
        "fakevllm/decorated.py",
        """
        import functools
        def twice(f):
            @functools.wraps(f)
            def g(*a): return 2 * f(*a)
            return g
        class C:
            @twice
            def f(self): return 1
        """,
    )
    module = importlib.import_module("fakevllm.decorated")
    site.provide(site.host("fakevllm.decorated:C.f"))

    ascend_opt.enable("greeter")

    assert module.C().f() == ("patched", 2)


@pytest.mark.parametrize("variant", ["another", "other"])
def test_another_function_whose_source_is_known_is_patched_as_its_own_variant(
    site, runner, variant
):
    """A replacement that the pass recognises is no conflict; `variants` names what is live."""
    site.write("fakevllm/other.py", "def step(self, x):\n    return x + 100\n")
    other = importlib.import_module("fakevllm.other")
    known = {**site.known(STEP), **site.known("fakevllm.other:step", variant)}
    seen = []

    def method(self, wrapped, instance, args, kwargs):
        seen.append(self.variants[STEP])
        return wrapped(*args, **kwargs)

    runner.Runner.step = other.step
    site.provide(site.host(STEP, known=known, method=method))
    ascend_opt.enable("greeter")

    assert runner.Runner().step(1) == 101
    assert seen == [variant]


@pytest.mark.parametrize("added", range(100, 108))
def test_another_function_whose_source_is_unknown_is_a_conflict(site, runner, added):
    """Whatever its fingerprint; the message says it, for whoever wants to add it."""
    site.write("fakevllm/other.py", f"def step(self, x):\n    return x + {added}\n")
    theirs = runner.Runner.step = importlib.import_module("fakevllm.other").step
    site.provide(site.host(STEP))

    with pytest.raises(
        ascend_opt.NotApplicableError, match=r"replaced by fakevllm\.other\.step .*sha \w+, unknown"
    ):
        ascend_opt.enable("greeter")

    assert vars(runner.Runner)["step"] is theirs


@pytest.mark.parametrize("variant", ["builtin", "left"])
def test_another_function_that_needs_no_patch_is_a_conflict(site, runner, variant):
    """A live function that already does it, or that the pass leaves alone, is not patched."""
    site.write("fakevllm/other.py", "def step(self, x):\n    return x + 100\n")
    runner.Runner.step = importlib.import_module("fakevllm.other").step
    known = {**site.known(STEP), **site.known("fakevllm.other:step", variant)}
    site.provide(site.host(STEP, known=known, leave=frozenset({"left"})))

    with pytest.raises(ascend_opt.NotApplicableError, match=f"variant '{variant}'"):
        ascend_opt.enable("greeter")


def test_we_are_spliced_out_under_a_later_wrapt_wrapper(site, runner):
    """Their wrapper stays outermost and calls the original."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    foreign_wrapt(runner.Runner, "step")
    theirs = vars(runner.Runner)["step"]

    ascend_opt.disable("greeter")

    assert vars(runner.Runner)["step"] is theirs
    assert runner.Runner().step(1) == 2


def test_disable_under_a_later_closure_refuses_and_names_it(site, runner):
    """Reverting would lose their patch: RevertError says whose, and the pass stays on."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    foreign_wraps(runner.Runner, "step")
    theirs = vars(runner.Runner)["step"]

    with pytest.raises(RevertError, match=r"Runner\.step .*test_patching\.py"):
        ascend_opt.disable("greeter")

    assert vars(runner.Runner)["step"] is theirs
    assert state().state == "active"
    assert runner.Runner().step(1) == ("patched", 2)


@pytest.mark.parametrize("foreign", [foreign_wrapt, foreign_wraps])
def test_disable_of_a_traced_patch_under_anything_later_refuses(site, foreign):
    """A plain function cannot be spliced out, not even under a wrapt wrapper."""
    model = importlib.import_module("fakevllm.model").Model
    site.provide(
        site.traced(FORWARD, lambda self, original: lambda this, x: ("traced", original(this, x)))
    )
    ascend_opt.enable("tracer")
    foreign(model, "forward")
    theirs = vars(model)["forward"]

    with pytest.raises(RevertError, match=r"Model\.forward .*test_patching"):
        ascend_opt.disable("tracer")

    assert vars(model)["forward"] is theirs
    assert model().forward(1) == ("traced", 10)


def test_a_refused_disable_reverts_none_of_several_targets(site, runner):
    """All or none: the target that could have come out stays in."""
    site.provide(site.host(FREE, STEP, known={**site.known(FREE), **site.known(STEP)}))
    ascend_opt.enable("greeter")
    foreign_wraps(runner.Runner, "step")

    with pytest.raises(RevertError):
        ascend_opt.disable("greeter")

    assert runner.free(1) == ("patched", 1)


def test_a_later_wholesale_replacement_is_noticed_and_named(site, runner):
    """`status` says `conflict` and who took the place; nothing of theirs is touched."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    runner.Runner.step = wait_for_nothing

    found = state()

    assert found.state == "conflict"
    assert "was replaced later by test_patching.wait_for_nothing" in found.reason
    assert vars(runner.Runner)["step"] is wait_for_nothing


def test_a_later_replacement_of_a_traced_patch_stays(site):
    """Taking the pass out must not put the original in the place of somebody's function."""
    model = importlib.import_module("fakevllm.model").Model
    site.provide(site.traced(FORWARD, lambda self, original: lambda this, x: original(this, x)))
    ascend_opt.enable("tracer")
    model.forward = wait_for_nothing

    assert state("tracer").state == "conflict"
    assert vars(model)["forward"] is wait_for_nothing


def test_a_later_deletion_is_noticed(site, runner):
    """There is nobody to name, and nothing to give back."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    del runner.Runner.step

    assert "was replaced later by nothing" in state().reason
    assert "step" not in vars(runner.Runner)


def test_a_patch_covered_by_an_opaque_closure_becomes_inert(site, runner):
    """A closure that hides us looks like a replacement: our code under it must stop, too."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    foreign_closure(runner.Runner, "step")

    assert state().state == "conflict"
    assert runner.Runner().step(1) == 2


def test_a_bound_method_kept_from_before_runs_unpatched_after_disable(site, runner):
    """What still holds our wrapper after `disable` gets the original's behaviour."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    kept = runner.Runner().step

    ascend_opt.disable("greeter")

    assert kept(1) == 2


def test_stale_bindings_are_found_and_named(site, runner):
    """A function taken by `from x import y` before it was patched is named in status and log."""
    site.write("fakevllm/user.py", "from fakevllm.runner import free as mine\n")
    importlib.import_module("fakevllm.user")
    site.provide(site.host(FREE))

    ascend_opt.enable("greeter")

    (target,) = state().targets
    assert target.note == "not patched where it was imported by name before: fakevllm.user.mine"


def test_looking_for_stale_bindings_compares_nothing(site, runner):
    """Modules hold arrays and worse, whose `==` raises or answers yes."""
    site.write(
        "fakevllm/user.py",
        """
        class Sour:
            def __eq__(self, other): raise ArithmeticError
        class Sweet:
            def __eq__(self, other): return True
        sour, sweet = Sour(), Sweet()
        """,
    )
    importlib.import_module("fakevllm.user")
    site.provide(site.host(FREE))

    assert ascend_opt.enable("greeter").state == "active"

    (target,) = state().targets
    assert target.note == ""


def test_stale_bindings_of_a_method_are_not_looked_for(site, runner):
    """`step = Runner.step` is the author's own alias; a method is found through its class."""
    runner.alias = runner.Runner.step
    site.provide(site.host(STEP))

    ascend_opt.enable("greeter")

    (target,) = state().targets
    assert target.note == ""


@pytest.mark.parametrize("redo", [True, False])
def test_what_fails_after_the_original_has_run_does_not_run_it_twice(site, runner, redo):
    """The caller gets the result of the one call, whatever `redo` says; the pass is off."""
    ran = []

    def late(self, wrapped, instance, args, kwargs):
        wrapped(*args, **kwargs)
        raise ZeroDivisionError("ours, afterwards")

    def counting(self, wrapped, instance, args, kwargs):
        ran.append(args)
        return wrapped(*args, **kwargs)

    site.provide(
        site.host(STEP, name="inner", method=counting), site.host(STEP, method=late, redo=redo)
    )
    ascend_opt.enable("inner")
    ascend_opt.enable("greeter")

    assert runner.Runner().step(1) == 2
    assert ran == [(1,)]
    assert {s.name: s.state for s in ascend_opt.status()} == {
        "greeter": "failed",
        "inner": "active",
    }


def test_what_fails_after_several_calls_of_the_original_returns_the_last_result(site, runner):
    """The caller gets what the pass got last, and none of the calls is repeated."""

    def late(self, wrapped, instance, args, kwargs):
        for x in (1, 2, 3):
            wrapped(x)
        raise ZeroDivisionError("ours, afterwards")

    site.provide(site.host(STEP, method=late))
    ascend_opt.enable("greeter")

    assert runner.Runner().step(0) == 4


@pytest.mark.parametrize("first_out", ["greeter", "second"])
def test_host_patches_of_two_passes_wrap_one_another(site, runner, first_out):
    """Two of our passes share a host target, and either can go first without harming the other."""
    original = vars(runner.Runner)["step"]
    site.provide(site.host(STEP), site.host(STEP, name="second"))
    ascend_opt.enable("greeter")
    ascend_opt.enable("second")
    assert runner.Runner().step(1) == ("patched", ("patched", 2))

    ascend_opt.disable(first_out)
    assert runner.Runner().step(1) == ("patched", 2)
    ascend_opt.disable({"greeter": "second", "second": "greeter"}[first_out])
    assert vars(runner.Runner)["step"] is original


def test_an_error_that_one_pass_lets_through_does_not_fail_the_one_around_it(site, runner):
    """With `redo=False` an error names its pass, and only that pass is off."""
    site.provide(site.host(STEP, method=failing, redo=False), site.host(STEP, name="outer"))
    ascend_opt.enable("greeter")
    ascend_opt.enable("outer")

    with pytest.raises(ZeroDivisionError):
        runner.Runner().step(1)

    states = {status.name: status.state for status in ascend_opt.status()}
    assert states == {"greeter": "failed", "outer": "active"}


def test_a_second_traced_patch_on_a_target_conflicts_by_name(site):
    """A traced replacement would drop the one before it, so it is refused, naming that one."""
    model = importlib.import_module("fakevllm.model")

    def make(self, original):
        def forward(self, x):
            return original(self, x) + 1

        return forward

    site.provide(site.traced(FORWARD, make), site.traced(FORWARD, make, name="second"))
    ascend_opt.enable("tracer")

    with pytest.raises(ascend_opt.NotApplicableError, match="second is conflict"):
        ascend_opt.enable("second")

    assert model.Model().forward(1) == 11


def failing(self, wrapped, instance, args, kwargs):
    raise ZeroDivisionError("ours")


def test_a_failing_wrapper_is_redone_with_the_original(site, runner, caplog):
    """Our error: the caller gets the original's result, the pass is `failed` and out."""
    original = vars(runner.Runner)["step"]
    site.provide(site.host(STEP, method=failing))
    ascend_opt.enable("greeter")

    assert runner.Runner().step(1) == 2

    assert state().state == "failed"
    assert "ZeroDivisionError: ours" in state().reason
    assert vars(runner.Runner)["step"] is original
    assert "greeter failed in fakevllm.runner:Runner.step and is now off" in caplog.text
    assert "the call is repeated with the original" in caplog.text


def test_a_type_error_of_ours_is_our_failure(site, runner):
    """With arguments that the original takes, it is no mistake of the caller."""

    def method(self, wrapped, instance, args, kwargs):
        raise TypeError("ours")

    site.provide(site.host(STEP, method=method))
    ascend_opt.enable("greeter")

    assert runner.Runner().step(1) == 2
    assert "TypeError: ours" in state().reason


def test_wrong_arguments_that_we_trip_over_are_the_callers_error(site, runner):
    """A method that unpacks what it is called with fails before the original can: not our fault."""

    def method(self, wrapped, instance, args, kwargs):
        return (lambda x: wrapped(x))(*args, **kwargs)

    site.provide(site.host(STEP, method=method))
    ascend_opt.enable("greeter")

    with pytest.raises(TypeError):
        runner.Runner().step(1, 2)

    assert state().state == "active"


def test_a_failing_wrapper_without_redo_raises_with_a_note(site, runner, caplog):
    """Where a call must not be repeated the error goes on, and says whose it is."""
    site.provide(site.host(STEP, method=failing, redo=False))
    ascend_opt.enable("greeter")

    with pytest.raises(ZeroDivisionError) as caught:
        runner.Runner().step(1)

    assert "raised by ascend_opt pass 'greeter'" in caught.value.__notes__[0]
    assert state().state == "failed"
    assert "the call is repeated" not in caplog.text


def broken_fail(self, reason):
    ascend_opt.Pass.fail(self, reason)
    raise OSError("the device is lost")


def test_a_wrapper_whose_pass_cannot_switch_itself_off_raises_with_a_note(site, runner):
    """What the original relies on may be missing: no redo; both errors, and the pass named."""
    site.provide(site.host(STEP, method=failing, facts={"fail": broken_fail}))
    ascend_opt.enable("greeter")

    with pytest.raises(OSError, match="device is lost") as caught:
        runner.Runner().step(1)

    assert "pass 'greeter' in fakevllm.runner:Runner.step while it" in caught.value.__notes__[0]
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert runner.Runner().step(1) == 2
    assert "ZeroDivisionError: ours" in state().reason


@pytest.mark.parametrize("fail", [broken_fail, lambda self, reason: 1 / 0])
def test_a_pass_whose_fail_raises_is_taken_out_all_the_same(site, runner, fail, caplog):
    """Disabling one such pass gives the original back, and what still holds our code is inert."""
    original = vars(runner.Runner)["step"]
    site.provide(site.host(STEP, facts={"fail": fail}))
    ascend_opt.enable("greeter")
    kept = runner.Runner().step

    assert ascend_opt.disable("greeter").state == "off"

    assert vars(runner.Runner)["step"] is original
    assert kept(1) == 2
    assert "its own fail() failed" in caplog.text


def test_a_failed_wrapper_is_inert_from_the_next_call_on(site, runner):
    """Even before anybody looks after it, the second call does not run our code."""
    calls = []

    def method(self, wrapped, instance, args, kwargs):
        calls.append(args)
        raise ZeroDivisionError

    site.provide(site.host(STEP, method=method))
    ascend_opt.enable("greeter")
    kept = runner.Runner().step

    assert (kept(1), kept(2)) == (2, 3)
    assert calls == [(1,)]


@pytest.mark.parametrize("redo", [True, False])
def test_an_error_of_the_original_passes_through_untouched(site, runner, redo):
    """It is not our failure: no note, no second call, the pass stays on."""
    site.provide(site.host(BOOM, redo=redo))
    ascend_opt.enable("greeter")

    with pytest.raises(LookupError, match="no 7") as caught:
        runner.Runner().boom(7)

    assert not hasattr(caught.value, "__notes__")
    assert state().state == "active"
    assert state().counters == {"steps": 1}


def test_wrong_arguments_are_the_callers_error_not_ours(site, runner):
    """A TypeError from calling the original is passed through; the pass stays on."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")

    with pytest.raises(TypeError, match="positional argument"):
        runner.Runner().step(1, 2)

    assert state().state == "active"


def test_keyboard_interrupt_is_never_swallowed(site, runner):
    """Only errors are ours to handle."""

    def method(self, wrapped, instance, args, kwargs):
        raise KeyboardInterrupt

    site.provide(site.host(STEP, method=method))
    ascend_opt.enable("greeter")

    with pytest.raises(KeyboardInterrupt):
        runner.Runner().step(1)
