"""enable, disable, status and their family: the state machine as users see it."""

import contextlib
import functools
import importlib
import os
import sys
import threading
from dataclasses import dataclass

import pytest
from unit.conftest import FORWARD, GREETER, STEP
from wrapt.importer import _post_import_hooks

import ascend_opt
from ascend_opt import ConfigError, NotApplicableError, ParameterError, UnknownPassError, control
from ascend_opt.config import ENVIRONMENT


@dataclass(frozen=True)
class Parameters:
    times: int = 1


def state(name="greeter"):
    return next(s for s in ascend_opt.status() if s.name == name)


def speculative(site, *targets):
    """Provide a pass that wants an engine without speculation."""
    known = {}
    for target in targets:
        known |= site.known(target)
    facts = {"conditions": (ascend_opt.NoSpeculator(),)}
    return site.provide(site.host(*targets, known=known, facts=facts))


class Config:
    def __init__(self, speculative_config=None):
        self.speculative_config = speculative_config


def start_worker(config):
    return importlib.import_module("vllm.v1.worker.worker_base").WorkerBase(config, rank=3)


def test_an_unknown_pass_names_the_nearest_and_all(site):
    """UnknownPassError is a ValueError that helps."""
    site.provide(site.host(STEP))

    with pytest.raises(UnknownPassError, match="did you mean 'greeter'"):
        ascend_opt.enable("greter")
    assert issubclass(UnknownPassError, ValueError)


def test_an_unknown_parameter_names_the_nearest_and_all(site):
    """ParameterError is a ValueError that helps; nothing is enabled."""
    site.provide(site.host(STEP, facts={"Parameters": Parameters}))

    with pytest.raises(ParameterError, match=r"no parameter 'time'; did you mean 'times'\?"):
        ascend_opt.enable("greeter", time=2)
    assert state().state == "off"
    assert issubclass(ParameterError, ValueError)


@pytest.mark.parametrize("call", [ascend_opt.disable, ascend_opt.explain])
def test_every_function_refuses_an_unknown_pass(site, call):
    """Disable and explain do not accept what enable does not."""
    site.provide(site.host(STEP))

    with pytest.raises(UnknownPassError):
        call("nothing")


def test_enabling_imports_nothing_of_what_it_patches(site):
    """It arms hooks: neither vLLM nor the target's package is imported."""
    site.provide(site.host(STEP))

    assert ascend_opt.enable("greeter").state == "armed"

    assert not {"vllm", "fakevllm"} & set(sys.modules)


def test_a_pass_becomes_active_when_its_target_is_imported(site):
    """armed, with the module it waits for; then active, patched."""
    site.provide(site.host(STEP))
    assert "waiting for the import of fakevllm.runner" in ascend_opt.enable("greeter").reason

    module = importlib.import_module("fakevllm.runner")

    assert state().state == "active"
    assert module.Runner().step(1) == ("patched", 2)


def test_a_disabled_pass_is_not_applied_by_its_old_hook(site):
    """enable, disable, import: the target is the original."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    ascend_opt.disable("greeter")

    assert importlib.import_module("fakevllm.runner").Runner().step(1) == 2


def test_enabling_twice_patches_once(site, runner):
    """The second call does nothing: same wrapper, counted once."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    installed = vars(runner.Runner)["step"]

    ascend_opt.enable("greeter")

    assert vars(runner.Runner)["step"] is installed
    assert runner.Runner().step(1) == ("patched", 2)


def test_enabling_with_other_parameters_changes_them(site, runner):
    """One wrapper, the new values, and `status` shows them."""
    site.provide(site.host(STEP, facts={"Parameters": Parameters}))
    ascend_opt.enable("greeter")

    ascend_opt.enable("greeter", times=5)

    assert runner.Runner().step(1) == ("patched", 2)
    assert state().parameters == {"times": 5}


def test_a_refused_change_of_parameters_keeps_the_old_ones(site, runner):
    """The new parameters cannot apply: the error says so, the pass stays on as it was."""

    def unmet(self):
        return "five is too many" if self.parameters.times == 5 else None

    site.provide(site.host(STEP, facts={"Parameters": Parameters, "unmet": unmet}))
    ascend_opt.enable("greeter", times=2)
    installed = vars(runner.Runner)["step"]

    with pytest.raises(NotApplicableError, match="five is too many"):
        ascend_opt.enable("greeter", times=5)

    assert vars(runner.Runner)["step"] is installed

    assert (state().state, state().parameters) == ("active", {"times": 2})
    assert runner.Runner().step(1) == ("patched", 2)


def test_a_change_of_parameters_that_fails_to_patch_restores_the_old_ones(site, runner):
    """What was taken out to make room goes back in, and works."""

    def make(self, original):
        if self.parameters.times == 5:
            raise RuntimeError("five")
        return lambda this, x: (self.parameters.times, self.failure, original(this, x))

    site.provide(site.traced(STEP, make, Parameters=Parameters))
    ascend_opt.enable("tracer", times=2)

    with pytest.raises(NotApplicableError, match="five"):
        ascend_opt.enable("tracer", times=5)

    assert runner.Runner().step(1) == (2, None, 2)
    assert state("tracer").state == "active"


def test_a_pass_over_several_modules_is_all_or_nothing(site):
    """A conflict in the second module takes the patch out of the first."""
    both = {**site.known(STEP), **site.known(FORWARD)}
    site.provide(site.host(STEP, FORWARD, known=both))
    ascend_opt.enable("greeter")
    runner = importlib.import_module("fakevllm.runner")
    assert runner.Runner().step(1) == ("patched", 2)
    site.write("fakevllm/model.py", "class Model:\n    forward = print\n")

    importlib.import_module("fakevllm.model")

    assert state().state in ("failed", "conflict")
    assert runner.Runner().step(1) == 2


@pytest.mark.parametrize("known", [{}, {"0123456789abcdef": "builtin"}])
def test_unknown_source_is_inapplicable_with_its_hash(site, runner, known):
    """The error gives target, hash, file and line; the original object stays."""
    original = vars(runner.Runner)["step"]
    (sha,) = site.known(STEP)
    site.provide(site.host(STEP, known={"f" * 16: "x", **known}))

    with pytest.raises(NotApplicableError, match=rf"unknown source of {STEP} \(sha {sha}, .*:6\)"):
        ascend_opt.enable("greeter")

    assert vars(runner.Runner)["step"] is original
    assert state().state == "inapplicable"


def test_allow_unknown_patches_and_says_so_loudly(site, runner, caplog):
    """The override is the user's own doing, and stands in the log with the target."""
    site.provide(site.host(STEP, known={"f" * 16: "x"}))

    assert ascend_opt.enable("greeter", allow_unknown=True).state == "active"

    assert runner.Runner().step(1) == ("patched", 2)
    assert f"PATCHES UNKNOWN SOURCE because of allow_unknown: {STEP}" in caplog.text


def test_a_builtin_pass_leaves_the_original_in_place(site, runner):
    """What the release already does is `builtin`: no error, no wrapper."""
    original = vars(runner.Runner)["step"]
    site.provide(site.host(STEP, known=site.known(STEP, "builtin")))

    assert ascend_opt.enable("greeter").state == "builtin"

    assert vars(runner.Runner)["step"] is original


def test_a_target_to_leave_is_left(site, runner):
    """Of two targets the one whose variant is in `leave` is not touched."""
    known = {**site.known(STEP), **site.known("fakevllm.runner:free", "left")}
    site.provide(site.host(STEP, "fakevllm.runner:free", known=known, leave=frozenset({"left"})))
    free = runner.free

    ascend_opt.enable("greeter")

    assert runner.free is free
    assert [t.patched for t in state().targets] == [True, False]


def test_a_missing_target_is_inapplicable(site):
    """A release without the target: the reason names it."""
    site.provide(site.host("fakevllm.runner:Runner.gone", known={"f" * 16: "x"}))

    with pytest.raises(NotApplicableError, match=r"fakevllm.runner:Runner.gone is not there"):
        ascend_opt.enable("greeter")


def test_a_missing_optional_target_is_no_obstacle(site, runner):
    """The pass is on for the targets that are there."""
    gone = site.host("fakevllm.runner:gone", known={"f" * 16: "x"}, optional=True)
    both = type("Both", (site.host(STEP),), {"other": vars(gone)["patch_0"], "__doc__": "Do."})
    site.provide(both)

    assert ascend_opt.enable("greeter").state == "active"


def test_the_engine_conditions_see_the_config_before_the_model(site, runner):
    """`armed` until a worker is created; its VllmConfig then makes the pass active."""
    speculative(site, STEP)
    assert "no engine has started" in ascend_opt.enable("greeter").reason

    worker = start_worker(Config())

    assert state().state == "active"
    assert worker.rank == 3


def test_an_engine_that_does_not_fit_reverts_everything(site, runner):
    """The reason is what was found; the original objects are back before the model is built."""
    step, forward = runner.Runner.step, importlib.import_module("fakevllm.model").Model.forward
    speculative(site, STEP, FORWARD)
    ascend_opt.enable("greeter")

    class Mtp:
        method = "mtp"

    worker = start_worker(Config(Mtp()))

    assert state().state == "inapplicable"
    assert state().reason == "speculative decoding is on (method mtp)"
    assert runner.Runner.step is step
    assert importlib.import_module("fakevllm.model").Model.forward is forward
    del worker


def test_a_module_imported_after_a_refusing_engine_is_not_patched(site):
    """The refusal holds for targets that are imported later."""
    speculative(site, STEP)
    ascend_opt.enable("greeter")
    worker = start_worker(Config(object()))

    assert importlib.import_module("fakevllm.runner").Runner().step(1) == 2
    del worker


def test_a_condition_that_raises_does_not_hold_and_does_not_reach_the_engine(site, runner):
    """An error in a condition is a reason, not a crash of the worker."""

    class Broken(ascend_opt.EngineCondition):
        name = "broken"
        description = "never"

        def unmet(self, subject, parameters):
            raise RuntimeError("oops")

    site.provide(site.host(STEP, facts={"conditions": (Broken(),)}))
    ascend_opt.enable("greeter")

    worker = start_worker(Config())

    assert "broken could not be decided: RuntimeError('oops')" in state().reason
    assert runner.Runner().step(1) == 2
    del worker


def test_enabling_after_a_worker_exists_asks_that_workers_config(site, runner):
    """A notebook that enables too late still gets the engine's conditions checked."""
    speculative(site, STEP)
    worker = start_worker(Config(object()))

    with pytest.raises(NotApplicableError, match="speculative decoding is on"):
        ascend_opt.enable("greeter")
    del worker


def test_an_engine_that_is_gone_refuses_no_longer(site, runner):
    """What a dead worker's configuration said does not bind the next one."""
    speculative(site, STEP)
    worker = start_worker(Config(object()))
    with pytest.raises(NotApplicableError):
        ascend_opt.enable("greeter")
    del worker

    assert ascend_opt.enable("greeter").state == "armed"


@pytest.mark.parametrize("hook", ["applied", "unmet", "reverted"])
def test_an_error_in_a_passs_own_hook_goes_no_further(site, runner, hook):
    """A broken third-party pass breaks neither us nor the import nor `status`."""

    def broken(self):
        raise RuntimeError(hook)

    original = vars(runner.Runner)["step"]
    site.provide(site.host(STEP, facts={hook: broken}))
    with contextlib.suppress(NotApplicableError):
        ascend_opt.enable("greeter")
    ascend_opt.disable("greeter")

    assert vars(runner.Runner)["step"] is original


def test_fail_takes_the_patches_out_soon_after(site, runner):
    """`self.fail(reason)` at run time: inert at once, `failed` with the reason in status."""
    original = vars(runner.Runner)["step"]

    def method(self, wrapped, instance, args, kwargs):
        self.fail("device lost")
        return wrapped(*args, **kwargs)

    site.provide(site.host(STEP, method=method))
    ascend_opt.enable("greeter")
    runner.Runner().step(1)

    assert (state().state, state().reason) == ("failed", "device lost")
    assert vars(runner.Runner)["step"] is original


def test_enabled_restores_what_was_before(site, runner):
    """The context manager: off outside, on inside; parameters of an outer enable come back."""
    site.provide(site.host(STEP, facts={"Parameters": Parameters}))

    with ascend_opt.enabled("greeter", times=3) as status:
        assert status.parameters == {"times": 3}
    assert state().state == "off"

    ascend_opt.enable("greeter", times=7)
    with ascend_opt.enabled("greeter", times=3):
        assert state().parameters == {"times": 3}
    assert state().parameters == {"times": 7}


def test_enabled_restores_after_an_error(site, runner):
    """An exception in the body leaves nothing on."""
    site.provide(site.host(STEP))

    with pytest.raises(ZeroDivisionError), ascend_opt.enabled("greeter"):
        raise ZeroDivisionError

    assert runner.Runner().step(1) == 2


def test_fifty_cycles_leave_nothing_behind(site, runner):
    """enable/disable: no growth in wrappers, hooks, threads, garbage of wrapt's."""
    known = {**site.known(STEP), **site.known(FORWARD)}
    site.provide(site.host(STEP, FORWARD, known=known))
    original = vars(runner.Runner)["step"]
    ascend_opt.enable("greeter")
    ascend_opt.disable("greeter")
    threads, hooks = threading.active_count(), len(_post_import_hooks["fakevllm.model"])

    for _ in range(50):
        ascend_opt.enable("greeter")
        ascend_opt.disable("greeter")

    assert threading.active_count() == threads
    assert len(_post_import_hooks["fakevllm.model"]) == hooks == 1
    assert vars(runner.Runner)["step"] is original


def test_reset_forgets_everything(site, runner):
    """As if just imported: off, originals in place, no environment, no record, no thread."""
    original = vars(runner.Runner)["step"]
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")

    ascend_opt.reset()

    assert state().reason == "not enabled"
    assert vars(runner.Runner)["step"] is original
    assert ENVIRONMENT not in os.environ


def test_threads_enable_disable_and_import_together(site):
    """Whatever the interleaving: no error, no deadlock, and one wrapper or none at the end."""
    site.provide(site.host(STEP, facts={"Parameters": Parameters}))
    start, errors = threading.Barrier(9), []

    def work(number):
        start.wait()
        try:
            for turn in range(10):
                ascend_opt.enable("greeter", times=1 + (number + turn) % 3)
                ascend_opt.status()
                ascend_opt.disable("greeter")
        except Exception as error:
            errors.append(error)

    def importer():
        start.wait()
        importlib.import_module("fakevllm.runner")

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    threads.append(threading.Thread(target=importer, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert not [thread for thread in threads if thread.is_alive()]
    assert errors == []
    runner = importlib.import_module("fakevllm.runner")
    assert runner.Runner().step(1) == 2
    ascend_opt.enable("greeter")
    assert runner.Runner().step(1) == ("patched", 2)


IMPORTING = """
import faulthandler, sys, threading, time
faulthandler.dump_traceback_later(20, exit=True)

import ascend_opt, fakevllm, fakevllm.runner
fakevllm.entered, fakevllm.go = threading.Event(), threading.Event()

def importer():
    import fakevllm.family

thread = threading.Thread(target=importer)
thread.start()
fakevllm.entered.wait(10)
ascend_opt.enable("maker")
thread.join()
import fakevllm.model
print(fakevllm.runner.free(1), fakevllm.model.Model().forward(1))
"""

MAKER = f"""
from ascend_opt import Pass, hookimpl, traced_patch
from ascend_opt.targets import Target, locate

def known(target):
    return {{locate(Target.parse(target)).fingerprint: "plain"}}

FREE = "fakevllm.runner:free"
FORWARD = "{FORWARD}"

class Maker(Pass):
    '''Import something while making a function.'''
    name = "maker"
    origin = remove_when = "test"

    @traced_patch(FREE, known=known(FREE))
    def free(self, original):
        import sys, time, fakevllm
        fakevllm.go.set()
        while "fakevllm.model" not in sys.modules:
            time.sleep(0.001)
        time.sleep(0.1)  # by now that thread is in our hook
        import fakevllm.family
        return lambda x: ("patched", original(x))

    @traced_patch(FORWARD, known=known(FORWARD))
    def forward(self, original):
        return lambda model, x: ("patched", original(model, x))

@hookimpl
def ascend_opt_passes():
    return [Maker]
"""


def test_a_pass_may_import_what_another_thread_is_importing(site):
    """An import in a traced patch's maker, while that import waits in our hook: no deadlock.

    The importing thread holds the module's import lock, the enabling one ours. When both are done
    everything is patched.
    """
    site.distribution("test-maker", "test_maker", MAKER)
    site.write(
        "fakevllm/family.py",
        """
        import fakevllm
        fakevllm.entered.set()
        fakevllm.go.wait(10)
        import fakevllm.model
        """,
    )

    out = site.run(IMPORTING).stdout

    assert out == "('patched', 1) ('patched', 10)\n"


def test_load_config_switches_on_what_it_says(site, runner, tmp_path):
    """A file and a mapping of the same form do the same."""
    site.provide(site.host(STEP, facts={"Parameters": Parameters}))
    path = tmp_path / "c.yaml"
    path.write_text("passes:\n  greeter: {times: 4}\n")

    (found,) = ascend_opt.load_config(path)
    (same,) = ascend_opt.load_config({"passes": {"greeter": {"times": 4}}})

    assert (found.state, found.parameters) == ("active", {"times": 4})
    assert found == same


def test_a_bad_config_applies_nothing_of_it(site, runner):
    """An error in the last pass of a config: the first is not enabled either."""
    site.provide(site.host(STEP), site.host(FORWARD, name="second"))

    with pytest.raises(ConfigError):
        ascend_opt.load_config({"passes": {"greeter": {}, "second": {"no": 1}}})

    assert state().state == "off"


def test_a_config_skips_what_cannot_apply_with_one_warning(site, runner, caplog):
    """Policy skip: the other pass is on."""
    site.provide(site.host(STEP), site.host(FORWARD, name="second", known={"f" * 16: "x"}))

    found = ascend_opt.load_config({"passes": {"greeter": {}, "second": {}}})

    assert [s.state for s in found] == ["active", "inapplicable"]
    assert caplog.text.count("second is inapplicable: unknown source") == 1


def test_a_strict_config_is_all_or_nothing(site, runner):
    """Policy strict: an error that names the pass; what was on before is on again."""
    site.provide(
        site.host(STEP, facts={"Parameters": Parameters}),
        site.host(FORWARD, name="second"),
    )
    ascend_opt.enable("greeter", times=2)
    importlib.import_module("fakevllm.model").Model.forward = print

    with pytest.raises(NotApplicableError, match="policy strict, but second is conflict"):
        ascend_opt.load_config(
            {"policy": "strict", "passes": {"greeter": {"times": 9}, "second": {}}}
        )

    assert (state().state, state().parameters) == ("active", {"times": 2})
    assert runner.Runner().step(1) == ("patched", 2)
    assert state("second").state == "off"


def test_a_config_cannot_change_what_someone_covers(site, runner):
    """A RevertError on the way is a reason like others: skipped, nothing half applied."""
    site.provide(site.host(STEP, facts={"Parameters": Parameters}))
    ascend_opt.enable("greeter", times=2)
    original = runner.Runner.step

    @functools.wraps(original)
    def closure(self, x):
        return original(self, x)

    runner.Runner.step = closure
    (found,) = ascend_opt.load_config({"passes": {"greeter": {"times": 3}}})

    assert found.state == "conflict"
    assert (state().state, state().parameters) == ("active", {"times": 2})


def test_strict_from_the_environment_raises_and_skip_does_not(site, monkeypatch):
    """read_environment: NotApplicableError under `policy: strict`, else a warning."""
    site.provide(site.host(STEP, known={"f" * 16: "x"}))
    monkeypatch.setenv(ENVIRONMENT, '{"passes": {"greeter": {}}}')
    control.read_environment()
    assert state().state == "inapplicable"
    control.reset()
    monkeypatch.setenv(ENVIRONMENT, '{"policy": "strict", "passes": {"greeter": {}}}')

    with pytest.raises(NotApplicableError, match=f"{ENVIRONMENT}: policy strict"):
        control.read_environment()


def test_a_strict_config_stops_an_engine_that_does_not_fit(site, runner):
    """Under `policy: strict` the worker does not start; else it does, without the pass."""
    speculative(site, STEP)
    ascend_opt.load_config({"policy": "strict", "passes": {"greeter": {}}})

    with pytest.raises(NotApplicableError, match="speculative decoding is on"):
        start_worker(Config(object()))


def test_off_in_the_environment_wins_over_enable(site, runner, monkeypatch, caplog):
    """An operator's `off` holds; the script goes on and the log says why nothing happens."""
    monkeypatch.setenv(ENVIRONMENT, "off")
    site.provide(site.host(STEP))

    assert ascend_opt.enable("greeter").state == "off"

    assert runner.Runner().step(1) == 2
    assert f"greeter stays off: {ENVIRONMENT}=off" in caplog.text


@pytest.mark.parametrize(
    "value", ["", "  ", "/no/such/file", "{", "passes: [1]", "\x01\n", "x" * 5000]
)
def test_garbage_in_the_environment_is_at_most_one_warning(
    site, runner, monkeypatch, caplog, value
):
    """It switches nothing on, raises nothing, and does not stop a later enable."""
    monkeypatch.setenv(ENVIRONMENT, value)
    site.provide(site.host(STEP))

    control.read_environment()

    assert state().state == "off"
    assert len(caplog.records) == bool(value.strip())
    assert ascend_opt.enable("greeter").state == "active"


def test_enable_exports_and_disable_and_reset_restore(site, runner, monkeypatch):
    """The environment carries what is on; with nothing on it is as it was found."""
    site.provide(site.host(STEP, facts={"Parameters": Parameters}))
    ascend_opt.enable("greeter", times=2)
    assert os.environ[ENVIRONMENT] == '{"policy": "skip", "passes": {"greeter": {"times": 2}}}'
    ascend_opt.disable("greeter")
    assert ENVIRONMENT not in os.environ

    control.reset()
    monkeypatch.setenv(ENVIRONMENT, '{"passes": {"greeter": null}}')
    ascend_opt.disable("greeter")
    assert os.environ[ENVIRONMENT] == '{"policy": "skip", "passes": {}}'
    control.reset()
    assert os.environ[ENVIRONMENT] == '{"passes": {"greeter": null}}'


SCRIPT = """
import multiprocessing, os
import ascend_opt

def child(queue):
    from ascend_opt.vllm_plugin import register
    register()
    from fakevllm.runner import Runner
    result = Runner().step(1)
    status = ascend_opt.status()[0]
    queue.put((result, status.state.value, status.counters, status.pid == os.getpid()))

if __name__ == "__main__":
    from fakevllm.runner import Runner
    ascend_opt.enable("greeter", times=3)
    Runner().step(1)
    context = multiprocessing.get_context(os.environ["METHOD"])
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=30))
    process.join()
    ascend_opt.disable("greeter")
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=30))
    process.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_get_what_is_on_whatever_the_start_method(site, method):
    """A child process has the pass, its parameters and counters of its own; after disable, not."""
    site.distribution("test-greeter", "test_greeter", GREETER)

    out = site.run(SCRIPT, METHOD=method).stdout.splitlines()

    assert out == [
        "(('patched', 3, 2), 'active', {'steps': 1}, True)",
        "(2, 'off', {}, True)",
    ]


def test_a_plain_subprocess_gets_it_through_the_environment(site):
    """`subprocess` children, like Ray workers, see only the variable."""
    site.distribution("test-greeter", "test_greeter", GREETER)
    child = (
        "from ascend_opt.vllm_plugin import register; register();"
        "from fakevllm.runner import Runner; print(Runner().step(1))"
    )

    out = site.run(
        f"""
        import subprocess, sys, ascend_opt
        ascend_opt.enable("greeter", times=4)
        print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True).stdout)
        """
    ).stdout

    assert "('patched', 4, 2)" in out


def test_explain_says_what_would_happen_and_changes_nothing(site, runner):
    """Every condition and target, with file, line, fingerprint and action; the pass stays off."""
    cls = speculative(site, STEP)
    original = vars(runner.Runner)["step"]

    found = ascend_opt.explain("greeter")

    (target,) = found.targets
    assert (target.action, target.line, target.variant) == ("patch", 6, "plain")
    assert [(f.name, f.holds) for f in found.findings] == [("no-speculator", None)]
    assert found.summary == cls.summary() == "Do greeter."
    assert vars(runner.Runner)["step"] is original
    assert state().state == "off"


def test_available_lists_the_classes_by_name(site):
    """In alphabetical order, whatever the order of installation."""
    second, first = site.host(FORWARD, name="second"), site.host(STEP, name="first")
    site.provide(second, first)

    assert ascend_opt.available() == [first, second]


def test_reset_leaves_what_is_covered_in_place_and_inert(site, runner, caplog):
    """Someone's closure on top is not broken; under it our code does nothing any more."""
    site.provide(site.host(STEP))
    ascend_opt.enable("greeter")
    original = runner.Runner.step

    @functools.wraps(original)
    def closure(self, x):
        return original(self, x)

    runner.Runner.step = closure
    ascend_opt.reset()

    assert runner.Runner().step(1) == 2
    assert "left in place, inert" in caplog.text
    assert state().state == "off"


def test_disabling_says_that_a_compiled_model_keeps_the_old_code(site):
    """Where the pass changes the graph and an engine has started; and only there."""
    site.provide(site.traced(FORWARD, lambda self, f: lambda this, x: f(this, x)))
    ascend_opt.available()[0].changes_graph = True
    importlib.import_module("fakevllm.model")
    ascend_opt.enable("tracer")
    assert ascend_opt.disable("tracer").reason == "disabled"
    ascend_opt.enable("tracer")
    worker = start_worker(Config())

    assert "compiled before keeps" in ascend_opt.disable("tracer").reason
    del worker


def test_enabling_a_graph_pass_too_late_is_said(site, caplog):
    """An engine that runs already keeps the code that it compiled: one warning."""
    importlib.import_module("fakevllm.model")
    site.provide(site.traced(FORWARD, lambda self, f: lambda this, x: f(this, x)))
    ascend_opt.available()[0].changes_graph = True
    worker = start_worker(Config())

    ascend_opt.enable("tracer")

    assert caplog.text.count("was enabled after an engine had started") == 1
    del worker


def test_an_engine_is_known_once_however_often_passes_go_on_and_off(site, runner, caplog):
    """Each time a graph pass comes too late, that is said once; no engine is asked twice."""
    asked = []

    class Asking(ascend_opt.EngineCondition):
        name = description = "asking"

        def unmet(self, subject, parameters):
            asked.append(subject)

    importlib.import_module("fakevllm.model")
    site.provide(site.traced(FORWARD, lambda self, f: lambda this, x: f(this, x)))
    cls = ascend_opt.available()[0]
    cls.changes_graph, cls.conditions = True, (Asking(),)
    ascend_opt.enable("tracer")
    worker = start_worker(Config())
    assert "enabled after an engine had started" not in caplog.text

    for _ in range(5):
        ascend_opt.disable("tracer")
        ascend_opt.enable("tracer")

    assert asked == [worker.vllm_config] * 6
    assert caplog.text.count("enabled after an engine had started") == 5


def test_a_pass_says_once_that_it_is_active(site, runner, caplog):
    """At most one INFO line for each pass and process."""
    caplog.set_level("INFO", logger="vllm.ascend_opt")
    site.provide(site.host(STEP, facts={"applied": lambda self: "greets"}))
    ascend_opt.enable("greeter")
    ascend_opt.enable("greeter")
    for _ in range(3):
        runner.Runner().step(1)
    ascend_opt.status()

    assert [r.getMessage() for r in caplog.records] == ["ascend_opt: greeter is active: greets"]
