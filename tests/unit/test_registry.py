"""Discovery: each distribution by itself; the broken ones named and skipped."""

import importlib
from dataclasses import dataclass

import pluggy
import pytest
from unit.conftest import GREETER, STEP

from ascend_opt import DuplicatePassError, UnknownPassError, hookimpl, registry
from ascend_opt.registry import EntryPoint, entry_points, load


def plugins(**modules):
    """Load registry entry points from objects; the distribution is named like the module."""
    points = [EntryPoint(f"dist-{name}", "1.0", "main", name) for name in modules]

    def importer(name):
        found = modules[name]
        if isinstance(found, BaseException):
            raise found
        return found

    return load(points, importer)


def plugin(*classes):
    class Plugin:
        @staticmethod
        @hookimpl
        def ascend_opt_passes():
            return classes

    return Plugin


def test_an_installed_distribution_is_found_by_its_entry_point(site):
    """Name, version, distribution and the pass class, from metadata on sys.path."""
    site.distribution("third-party", "third_party", GREETER, version="2.5")

    found = load([p for p in entry_points() if p.distribution == "third-party"])

    assert found.problems == []
    assert found.get("greeter").distribution == "third-party"
    assert found.get("greeter").cls is importlib.import_module("third_party").Greeter


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (ImportError("no such thing"), "ImportError: no such thing"),
        (SyntaxError("bad"), "SyntaxError: bad"),
        (SystemExit(3), "SystemExit: 3"),
        (object(), "implements no hook 'ascend_opt_passes'"),
        (plugin(int), "<class 'int'> is not a subclass of ascend_opt.Pass"),
        (plugin(3), "3 is not a subclass of ascend_opt.Pass"),
    ],
)
def test_a_broken_distribution_is_named_and_skipped(site, broken, message):
    """Whatever is wrong with one, the others' passes are there."""
    found = plugins(bad=broken, good=plugin(site.host(STEP)))

    assert list(found.passes) == ["greeter"]
    (problem,) = found.problems
    assert problem.startswith("dist-bad")
    assert message in problem


def test_a_misspelt_hook_is_named(site):
    """Pluggy accepts it silently until asked."""

    class Plugin:
        @staticmethod
        @hookimpl
        def ascend_opt_pass():
            return []

    found = plugins(bad=Plugin, good=plugin(site.host(STEP)))

    assert "unknown hook 'ascend_opt_pass'" in found.problems[0]
    assert list(found.passes) == ["greeter"]


@pytest.mark.parametrize("returned", [None, 3, ZeroDivisionError("oops")])
def test_a_hook_that_returns_nonsense_or_raises_is_named(returned):
    """None, no iterable, an exception: one problem each."""

    class Plugin:
        @staticmethod
        @hookimpl
        def ascend_opt_passes():
            if isinstance(returned, Exception):
                raise returned
            return returned

    found = plugins(bad=Plugin)

    assert len(found.problems) == 1
    assert "dist-bad" in found.problems[0]


def test_two_distributions_with_one_pass_name_are_both_named(site):
    """Using the pass is an error that names both; it is reported, and the others work."""
    first, second = site.host(STEP), site.host(STEP)
    found = plugins(a=plugin(first), b=plugin(second), c=plugin(site.host(STEP, name="other")))

    with pytest.raises(DuplicatePassError, match="dist-a and dist-b; uninstall one"):
        found.get("greeter")
    assert list(found.passes) == ["other"]
    assert "dist-a and dist-b" in found.problems[0]


def test_three_distributions_with_one_pass_name_are_all_named(site):
    """The third does not get the name because the first two lost it."""
    found = plugins(**{n: plugin(site.host(STEP)) for n in "abc"})

    with pytest.raises(DuplicatePassError, match="dist-a and dist-b and dist-c"):
        found.get("greeter")


def test_one_class_under_two_entry_points_is_one_pass(site):
    """Registering a module twice is harmless."""
    cls = site.host(STEP)
    found = plugins(a=plugin(cls), b=plugin(cls))

    assert found.get("greeter").cls is cls
    assert found.problems == []


def test_an_unknown_name_lists_what_there_is(site):
    """With the nearest."""
    found = plugins(a=plugin(site.host(STEP)))

    with pytest.raises(UnknownPassError, match=r"did you mean 'greeter'.*valid: greeter"):
        found.get("greeting")


def test_an_unknown_name_where_there_are_none():
    """The message does not promise a choice."""
    with pytest.raises(UnknownPassError, match="there are none"):
        plugins().get("greeter")


@dataclass(frozen=True)
class Required:
    limit: int


@dataclass(frozen=True)
class Taken:
    allow_unknown: bool = False


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"name": 5}, "has no name"),
        ({"origin": None}, "has no origin"),
        ({"__doc__": ""}, "has no docstring"),
        ({"Parameters": dict}, "Parameters is no dataclass"),
        ({"Parameters": Required}, "a parameter has no default"),
        ({"Parameters": Taken}, "option of its own named 'allow_unknown'"),
    ],
)
def test_a_pass_class_with_a_flaw_is_left_out(site, facts, message):
    """What would fail later, far from its cause, is reported at discovery."""
    found = plugins(a=plugin(site.host(STEP, facts=facts), site.host(STEP, name="fine")))

    assert list(found.passes) == ["fine"]
    assert message in found.problems[0]


def test_a_pass_that_patches_one_target_twice_is_left_out(site):
    """It would conflict with itself."""
    found = plugins(a=plugin(site.host(STEP, STEP)))

    assert "patches fakevllm.runner:Runner.step more than once" in found.problems[0]


def test_an_entry_point_may_name_an_attribute(site):
    """`module:object`, as entry points elsewhere."""
    hook = "class Inner:\n    ascend_opt_passes = staticmethod(ascend_opt_passes)\n"
    site.write("third_party.py", GREETER + hook)

    found = load([EntryPoint("third-party", "1", "main", "third_party:Inner")])

    assert found.problems == []
    assert list(found.passes) == ["greeter"]


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"no section\n", b"[ascend_opt.passes]\n[["])
def test_unreadable_metadata_costs_that_distribution_alone(site, text, caplog):
    """A broken entry_points.txt is named in the log; the others are found."""
    site.distribution("third-party", "third_party", GREETER)
    path = site.write("broken-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: broken\n")
    (path.parent / "entry_points.txt").write_bytes(text + b"ascend_opt.passes")

    assert "third-party" in [point.distribution for point in entry_points()]
    assert "broken-1.0.dist-info: metadata cannot be read" in caplog.text


def test_the_first_of_two_installations_counts(site, tmp_path, monkeypatch):
    """Two copies of one distribution on sys.path are one: the one that Python imports."""
    site.distribution("third-party", "third_party", GREETER, version="1.0")
    other = tmp_path / "other"
    monkeypatch.setattr(site, "directory", other)
    site.distribution("third-party", "third_party", GREETER, version="9.0")
    monkeypatch.syspath_prepend(str(other))

    found = [p for p in entry_points() if p.distribution == "third-party"]

    assert [point.version for point in found] == ["9.0"]


def test_discovery_happens_once(monkeypatch):
    """For each process."""
    calls = []
    monkeypatch.setattr(registry, "entry_points", lambda: calls.append(1) or [])
    registry.discover.cache_clear()

    assert registry.discover() is registry.discover()

    assert calls == [1]
    registry.discover.cache_clear()


def test_pluggy_is_the_mechanism():
    """A plugin manager with our hook specification accepts a plugin of ours."""
    from ascend_opt import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin())

    assert manager.hook.ascend_opt_passes() == [()]
