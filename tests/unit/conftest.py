"""A site directory with a light `vllm`, a package to patch, and distributions made on the spot."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import hypothesis
import pytest

from ascend_opt import Pass, control, host_patch, registry, reporting, traced_patch
from ascend_opt.config import ENVIRONMENT
from ascend_opt.targets import Target, locate

# Machines are shared: how long an example takes is no claim of ours.
hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")

FILES = {
    "vllm/__init__.py": "",
    "vllm/envs.py": "environment_variables = {}\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/worker_base.py": """
        class WorkerBase:
            def __init__(self, vllm_config, rank=0):
                self.vllm_config = vllm_config
                self.rank = rank
        """,
    "fakevllm/__init__.py": "",
    "fakevllm/runner.py": """
        def free(x):
            return x

        class Runner:
            def step(self, x):
                return x + 1

            def boom(self, x):
                raise LookupError(f"no {x}")

            @staticmethod
            def scale(x):
                return x * 2

            @classmethod
            def make(cls):
                return cls.__name__

        class Child(Runner):
            pass
        """,
    "fakevllm/model.py": """
        class Model:
            def forward(self, x):
                return x * 10
        """,
}

STEP = "fakevllm.runner:Runner.step"
FORWARD = "fakevllm.model:Model.forward"


def patched(self, wrapped, instance, args, kwargs):
    self.counters["steps"] += 1
    return ("patched", wrapped(*args, **kwargs))


class Site:
    """Packages and passes for one test."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        self._monkeypatch = monkeypatch
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name, text):
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return path

    def known(self, target, variant="plain"):
        return {locate(Target.parse(target)).fingerprint: variant}

    def host(self, *targets, name="greeter", method=patched, known=None, facts=None, **options):
        """Return a pass class with one host patch for each target."""
        body = {"name": name, "origin": "test", "remove_when": "never", "__doc__": f"Do {name}."}
        for number, target in enumerate(targets):

            def patch(self, *args, _method=method):
                return _method(self, *args)

            patch.__name__ = f"patch_{number}"
            mark = host_patch(target, known=known or self.known(target), **options)
            body[patch.__name__] = mark(patch)
        return type("Greeter", (Pass,), {**body, **(facts or {})})

    def traced(self, target, make, name="tracer", **facts):
        """Return a pass class with one traced patch."""
        body = {"name": name, "origin": "test", "remove_when": "never", "__doc__": f"Do {name}."}

        def patch(self, original):
            return make(self, original)

        body["patch"] = traced_patch(target, known=self.known(target))(patch)
        return type("Tracer", (Pass,), {**body, **facts})

    def provide(self, *classes, distribution="test-passes"):
        """Make these the installed passes."""
        found = registry.Registry()
        found.add(distribution, classes)
        assert not found.problems, found.problems
        self._monkeypatch.setattr(registry, "discover", lambda: found)
        return classes[0]

    def distribution(self, name, module, text, version="1.0"):
        """Install a distribution whose entry point is a module of its own."""
        self.write(f"{module}.py", text)
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.write(f"{info}/entry_points.txt", f"[ascend_opt.passes]\nmain = {module}\n")

    def run(self, code, check=True, **environment):
        """Run a script in a fresh process that sees this site directory; return its output."""
        script = self.directory / "script.py"
        script.write_text(textwrap.dedent(code))
        path = os.pathsep.join(p for p in (str(self.directory), os.environ.get("PYTHONPATH")) if p)
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=50,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done


GREETER = f"""
from ascend_opt import Pass, hookimpl, host_patch
from ascend_opt.targets import Target, locate
from dataclasses import dataclass

TARGET = "{STEP}"

@dataclass(frozen=True)
class Parameters:
    times: int = 1

class Greeter(Pass):
    '''Mark every step.'''
    name = "greeter"
    origin = "test"
    remove_when = "never"
    Parameters = Parameters

    @host_patch(TARGET, known={{locate(Target.parse(TARGET)).fingerprint: "plain"}})
    def step(self, wrapped, instance, args, kwargs):
        self.counters["steps"] += 1
        return ("patched", self.parameters.times, wrapped(*args, **kwargs))

@hookimpl
def ascend_opt_passes():
    return [Greeter]
"""


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setenv(reporting.ENVIRONMENT, str(tmp_path / "run"))
    yield
    control.reset()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a site directory on sys.path; what was imported from it is forgotten afterwards."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    hidden = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in ("vllm", "fakevllm")}
    for name in hidden:
        del sys.modules[name]
    yield Site(directory, monkeypatch)
    control.reset()
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(directory):
            del sys.modules[name]
    sys.modules.update(hidden)


@pytest.fixture
def runner(site):
    """Return `fakevllm.runner`, imported."""
    return importlib.import_module("fakevllm.runner")
