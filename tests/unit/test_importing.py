"""Import hooks survive what imports can do."""

import importlib
import sys
import threading
import time

import pytest

from ascend_opt.importing import imported, when_imported


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited 10 s in vain"
        time.sleep(0.002)


def test_calls_back_when_the_module_is_imported_later(site):
    """The callback gets the module, with its body run, before the import statement returns."""
    seen = []
    when_imported("fakevllm.runner", lambda module: seen.append(module.Child))

    module = importlib.import_module("fakevllm.runner")

    assert [module.Child] == seen


def test_calls_back_at_once_when_the_module_is_there(runner):
    """For an imported module there is nothing to wait for."""
    seen = []

    when_imported("fakevllm.runner", seen.append)

    assert [runner] == seen


def test_arming_twice_calls_once(site):
    """The same callback for the same module is one hook."""
    seen = []
    for _ in range(50):
        when_imported("fakevllm.runner", seen.append)

    importlib.import_module("fakevllm.runner")

    assert len(seen) == 1


def test_two_callbacks_of_one_module_are_both_called(site):
    """A second callback for a module that is waited for is not lost."""
    seen = []
    when_imported("fakevllm.runner", lambda _: seen.append(1))
    when_imported("fakevllm.runner", lambda _: seen.append(2))

    importlib.import_module("fakevllm.runner")

    assert seen == [1, 2]


def test_an_error_in_a_callback_breaks_neither_the_import_nor_the_next_callback(site, caplog):
    """What a hook raises is logged and goes no further."""
    seen = []
    when_imported("fakevllm.runner", lambda module: module.missing)
    when_imported("fakevllm.runner", seen.append)

    module = importlib.import_module("fakevllm.runner")

    assert [module] == seen
    assert "import hook of fakevllm.runner failed" in caplog.text


def test_a_failed_import_leaves_the_hook_for_the_next_try(site):
    """A module that raises while it is imported is patched when a later import succeeds."""
    path = site.write("fakevllm/late.py", "raise RuntimeError('not yet')\n")
    seen = []
    when_imported("fakevllm.late", seen.append)
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module("fakevllm.late")
    path.write_text("VALUE = 1  # another size, so that no cached bytecode is taken\n")
    importlib.invalidate_caches()

    module = importlib.import_module("fakevllm.late")

    assert [module] == seen


def test_a_module_half_imported_by_this_thread_is_called_back_complete(site):
    """Armed from inside the module's own import, the callback waits for the end of the body."""
    site.write(
        "fakevllm/half.py",
        """
        import sys
        sys.modules["fakevllm"].arm()
        LAST = 1
        """,
    )
    seen = []
    importlib.import_module("fakevllm").arm = lambda: when_imported(
        "fakevllm.half", lambda module: seen.append(getattr(module, "LAST", None))
    )

    importlib.import_module("fakevllm.half")

    wait_until(lambda: seen)
    assert seen == [1]


def slow_module(site, name, tail):
    """Write a module that waits in the middle of its import; return its two events."""
    site.write(
        f"fakevllm/{name}.py",
        f"""
        import sys
        sys.modules["fakevllm"].entered.set()
        sys.modules["fakevllm"].go.wait(10)
        {tail}
        """,
    )
    package = importlib.import_module("fakevllm")
    package.entered, package.go = threading.Event(), threading.Event()
    return package.entered, package.go


def test_a_module_half_imported_by_another_thread_is_called_back_complete(site):
    """Arming neither blocks on the other thread's import nor sees the half-built module."""
    entered, go = slow_module(site, "slow", "LAST = 1")
    thread = threading.Thread(target=importlib.import_module, args=("fakevllm.slow",))
    thread.start()
    entered.wait(10)
    seen = []

    when_imported("fakevllm.slow", lambda module: seen.append(getattr(module, "LAST", None)))
    assert seen == []
    go.set()
    thread.join()

    wait_until(lambda: seen)
    assert seen == [1]


def test_a_half_imported_module_that_then_fails_is_not_imported_again_by_us(site):
    """We wait for the next import that somebody else asks for; then the callback comes."""
    entered, go = slow_module(site, "doomed", "raise RuntimeError('doomed')")
    errors, seen = [], []

    def importer():
        try:
            importlib.import_module("fakevllm.doomed")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=importer)
    thread.start()
    entered.wait(10)
    when_imported("fakevllm.doomed", seen.append)
    waiters = [t for t in threading.enumerate() if t.name == "ascend_opt-import"]
    entered.clear()
    go.set()
    thread.join()
    for waiter in waiters:
        waiter.join(10)

    assert len(errors) == 1
    assert not entered.is_set()
    site.write("fakevllm/doomed.py", "FINE = True\n")
    module = importlib.import_module("fakevllm.doomed")
    assert [module] == seen


def test_two_threads_importing_one_module_call_back_once(site):
    """The import lock lets one of them run the body, and the hook."""
    seen = []
    when_imported("fakevllm.runner", seen.append)
    threads = [
        threading.Thread(target=importlib.import_module, args=("fakevllm.runner",))
        for _ in range(8)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seen) == 1


def test_a_module_in_the_middle_of_its_import_does_not_count_as_imported(site):
    """`imported` answers None until the body has run."""
    site.write(
        "fakevllm/asks.py",
        """
        from ascend_opt.importing import imported
        ANSWER = imported(__name__)
        """,
    )

    module = importlib.import_module("fakevllm.asks")

    assert module.ANSWER is None
    assert imported("fakevllm.asks") is module


def test_waiting_imports_nothing(site):
    """A hook for a module that exists does not import it or its package."""
    when_imported("fakevllm.runner", lambda _: None)

    assert "fakevllm" not in sys.modules
