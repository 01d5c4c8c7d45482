"""Faults in a running real vLLM, each with its end: tokens, state and reason, engine alive.

One engine meets them one after another (faults_program.py); two servers of two users meet SIGKILL.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import faults_program
from engine.third_party import install

from ascend_opt.config import ENVIRONMENT
from ascend_opt.reporting import ENVIRONMENT as RUN_DIRECTORY
from ascend_opt.tiny import write_tiny_model

HERE = Path(__file__).parent
EXECUTE = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model"
SAMPLE = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens"
TOO_LATE = (
    "ascend_opt: mlp-prefetch was enabled after an engine had started: a model that is already "
    "compiled or captured keeps the code that it has"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, and a third party's distributions; one of them cannot be imported."""
    directory = tmp_path_factory.mktemp("faults")
    write_tiny_model(directory / "tiny")
    (directory / "site").mkdir()
    text = HERE.joinpath("faulty_passes.py").read_text()
    install(directory / "site", "faulty_passes", text)
    install(directory / "site", "unimportable", "raise RuntimeError('no such driver')")
    return directory


@pytest.fixture(scope="module")
def environ(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(directory / "site"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads that spin for one another take a busy machine's time from everybody.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


@pytest.fixture(scope="module")
def ends(directory: Path, environ: dict[str, str]) -> dict[str, Any]:
    """How each fault ended; the engine's plugin function meets an unreadable configuration."""
    unreadable = directory / "unreadable.yaml"
    unreadable.write_bytes("passes: {} # é".encode("latin-1"))
    done = subprocess.run(
        [sys.executable, HERE / "faults_program.py", directory / "tiny"],
        env={
            **environ,
            ENVIRONMENT: str(unreadable),
            RUN_DIRECTORY: str(directory / "records"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(directory / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def state(end: dict[str, Any], name: str) -> str:
    found: str = end["passes"][name]["state"]
    return found


def patched(end: dict[str, Any], name: str) -> list[bool]:
    return [target["patched"] for target in end["passes"][name]["targets"]]


def test_the_workload_can_tell(ends: dict[str, Any]) -> None:
    """Each prompt has tokens of its own, over all the steps that faults are injected into."""
    assert [len(tokens) for tokens in ends["tokens"]] == [faults_program.STEPS] * 3
    assert len({tuple(tokens) for tokens in ends["tokens"]}) == 3


def test_an_unreadable_configuration_is_one_warning(ends: dict[str, Any]) -> None:
    """The plugin function names the file and why; every pass is off, the engine starts."""
    (line,) = [line for line in ends["start"]["log"] if "all passes stay off" in line]
    assert "unreadable.yaml: cannot be read: 'utf-8' codec" in line
    assert set(ends["start"]["states"].values()) == {"off"}


def test_a_pass_whose_module_raises_at_import_is_left_out_by_name(ends: dict[str, Any]) -> None:
    """It is reported, cannot be enabled, and costs no other pass."""
    end = ends["unimportable pass"]
    assert end["problems"] == [
        "unimportable 1.0, entry point 'unimportable': RuntimeError: no such driver"
    ]
    assert end["error"].startswith("UnknownPassError: no pass 'unimportable'")
    assert "counter" in ends["start"]["states"]
    assert end["equal"]


def test_a_target_module_that_raises_at_import_raises_its_own_error(ends: dict[str, Any]) -> None:
    """Whoever imports it gets its error, each time; the pass waits."""
    end = ends["unimportable target"]
    assert end["errors"] == ["ModuleNotFoundError: No module named 'flashinfer'"] * 2
    assert (state(end, "flashinfer"), end["equal"]) == ("armed", True)


def test_a_target_without_the_method_is_inapplicable(ends: dict[str, Any]) -> None:
    """The error names the target; nothing is touched."""
    end = ends["missing method"]
    assert end["error"].startswith("NotApplicableError: missing-method is inapplicable: ")
    assert end["error"].endswith("GPUModelRunner.no_such_method is not there")
    assert end["equal"]


def test_a_method_that_someone_deleted_fails_the_pass_whole(ends: dict[str, Any]) -> None:
    """In the source but not in the class: `failed`, and its other patch is out again."""
    end = ends["gone method"]
    assert "gone-method is failed: " in end["error"]
    assert end["error"].endswith("is in the source but not in the imported module")
    assert end["equal"]
    # The passes of the next faults find the method that gone-method had patched first.
    assert not any(patched(ends["raises-before at 1"], "raises-before"))


@pytest.mark.parametrize("at", [1, 100])
@pytest.mark.parametrize(
    ("name", "target", "message", "redone"),
    [
        ("raises-before", EXECUTE, "too early", "; the call is repeated with the original"),
        ("raises-after", SAMPLE, "too late", ""),
    ],
)
def test_a_wrapper_that_raises_costs_the_pass_and_no_token(
    ends: dict[str, Any], at: int, name: str, target: str, message: str, redone: str
) -> None:
    """Redone with the original if that has not run, and never run twice if it has."""
    end = ends[f"{name} at {at}"]
    found = end["passes"][name]
    assert end["equal"]
    assert (found["state"], found["reason"]) == ("failed", f"{target}: RuntimeError: {message}")
    assert found["counters"] == {"steps": at}
    assert not any(patched(end, name))
    assert end["log"] == [
        (
            f"ascend_opt: pass {name} failed in {target} and is now off in this process{redone} "
            f"RuntimeError('{message}')"
        ),
        f"ascend_opt: {name} is failed: {target}: RuntimeError: {message}",
    ]


def test_a_wrapper_that_must_not_be_repeated_surfaces_with_its_pass(ends: dict[str, Any]) -> None:
    """The engine's caller gets the error, with a note that names pass and target."""
    end = ends["surfacing"]
    assert end["error"] == "RuntimeError('once only')"
    assert end["notes"] == [f"raised by ascend_opt pass 'surfacing' in {EXECUTE}"]
    assert state(end, "surfacing") == "failed"


@pytest.mark.parametrize("at", [1, 100])
def test_an_error_inside_the_custom_op_costs_the_pass_and_no_token(
    ends: dict[str, Any], at: int
) -> None:
    """The op answers no more; the forward pass goes on, in the middle of a step."""
    end = ends[f"backend at {at}"]
    found = end["passes"]["mlp-prefetch"]
    assert end["equal"]
    assert (found["state"], found["reason"]) == (
        "failed",
        "prefetch: RuntimeError: the device is lost",
    )
    assert (end["calls"], found["counters"]["calls"]) == (at, at)
    assert end["log"] == [
        TOO_LATE,
        (
            "ascend_opt: mlp-prefetch failed and is now off in this process "
            "RuntimeError('the device is lost')"
        ),
        "ascend_opt: mlp-prefetch is failed: prefetch: RuntimeError: the device is lost",
    ]


def test_a_custom_op_that_is_there_already_fails_the_pass(ends: dict[str, Any]) -> None:
    """Someone else's op stays theirs; when they are gone, the pass can be enabled."""
    end = ends["op registered twice"]["while_there"]
    assert "mlp-prefetch is failed: " in end["error"]
    assert "the same name and overload name multiple times" in end["error"]
    assert end["equal"]
    assert not any(patched(end, "mlp-prefetch"))
    afterwards = ends["op registered twice"]["afterwards"]
    assert afterwards["equal"]
    assert afterwards["passes"]["mlp-prefetch"]["counters"]["prefetches"] > 0


@pytest.mark.parametrize("library", ["wrapt", "closure"])
def test_a_librarys_patch_before_ours_is_a_conflict_until_it_is_gone(
    ends: dict[str, Any], library: str
) -> None:
    """Theirs goes on to be called, and ours says whose it is; it is active once they unpatch."""
    end = ends[f"{library} before"]
    there, afterwards = end["while_there"], end["afterwards"]
    assert there["equal"]
    assert afterwards["equal"]
    assert state(there, "counter") == "conflict"
    assert f"{EXECUTE} is already patched by " in there["error"]
    assert "faults_program.py:" in there["error"]
    assert there["theirs"] == 12
    assert state(afterwards, "counter") == "active"
    assert afterwards["passes"]["counter"]["counters"]["steps"] == 12
    assert end["restored"]


def test_a_wrapt_wrapper_after_ours_stays_when_ours_goes(ends: dict[str, Any]) -> None:
    """Both are called; `disable` takes ours out under theirs; unpatching gives the original."""
    end = ends["wrapt after"]
    assert end["both"]["equal"]
    assert end["both"]["passes"]["counter"]["counters"]["steps"] == end["both"]["theirs"] == 12
    assert end["out"]["equal"]
    assert (state(end["out"], "counter"), end["out"]["error"]) == ("off", "")
    assert end["out"]["passes"]["counter"]["counters"]["steps"] == end["out"]["theirs"] == 12
    assert end["restored"]


def test_a_closure_after_ours_keeps_ours_in_place(ends: dict[str, Any]) -> None:
    """`disable` refuses and names it; once they unpatch, it gives the original back."""
    end = ends["closure after"]
    assert end["both"]["equal"]
    assert end["out"]["equal"]
    assert state(end["out"], "counter") == "active"
    assert "was put on top of it later; remove that first" in end["out"]["error"]
    assert end["out"]["passes"]["counter"]["counters"]["steps"] == 24
    assert end["afterwards"]["equal"]
    assert end["restored"]


def test_a_library_that_puts_the_original_back_over_ours_is_noticed(ends: dict[str, Any]) -> None:
    """`conflict`, naming what stands there; theirs is not touched."""
    end = ends["restores too much"]
    assert end["equal"]
    assert state(end, "counter") == "conflict"
    assert "execute_model was replaced later by " in end["passes"]["counter"]["reason"]
    assert end["restored"]


def test_threads_that_enable_while_another_imports_do_not_deadlock(ends: dict[str, Any]) -> None:
    """A pass that imports, under our lock, what is being imported, under Python's: all patched."""
    end = ends["threads and imports"]
    assert end["there"] == []  # the import was a real one
    assert end["errors"] == []
    assert end["equal"]
    assert {found["state"] for found in end["passes"].values()} == {"active"}
    assert patched(end, "importing") == [True, True]


def test_fifty_cycles_under_load_leave_nothing_behind(ends: dict[str, Any]) -> None:
    """No wrapper, file or thread more, no object that stays; every token equal."""
    end = ends["cycles"]
    assert end["equal"]
    assert end["errors"] == []
    growth = end["growth"]
    assert (growth["wrappers"], growth["files"], growth["threads"]) == (0, 0, 0)
    assert growth["objects"] < 10 * faults_program.CYCLES
    assert growth["KiB"] < 16 * 1024
    assert end["restored"]
    assert end["log"] == [TOO_LATE] * (faults_program.CYCLES + 3)


def test_a_fork_after_enable_has_the_pass_and_a_life_of_its_own(ends: dict[str, Any]) -> None:
    """Active in the child, with no counts; what the child disables stays on in the parent."""
    end = ends["fork"]
    child = end["child"]
    assert child["pid"] == child["inherited"]["pid"] == end["pid_of_child"]
    assert (child["inherited"]["state"], child["inherited"]["counters"]) == ("active", {})
    assert (child["afterwards"], child["restored"]) == ("off", True)
    assert end["equal"]
    assert (state(end, "counter"), end["passes"]["counter"]["counters"]["steps"]) == ("active", 24)


@pytest.mark.parametrize(
    ("fault", "reason"), [("no room", "File too large"), ("read only", "/proc/self/task")]
)
def test_records_that_cannot_be_written_cost_one_warning(
    ends: dict[str, Any], fault: str, reason: str
) -> None:
    """The pass goes on and counts; nothing half-written stays; writing starts again by itself."""
    end = ends[fault]
    assert end["equal"]
    assert (state(end, "counter"), end["passes"]["counter"]["counters"]["steps"]) == ("active", 12)
    assert end["left"] == []
    assert end["written_again"]
    (line,) = end["log_of_fault"]
    assert line.startswith("ascend_opt: no record of this process for `ascend_opt status`: ")
    assert reason in line
    assert end["log"] == []


NOBODY = 65534


class Server:
    """A server of one user."""

    def __init__(self, directory: Path, environ: dict[str, str], shared: Path, uid: int) -> None:
        self.home = shared / f"home-{uid}"
        self.home.mkdir(mode=0o700)
        os.chown(self.home, uid, uid)
        # Another user, who may read the interpreter wherever it is installed, and nothing more.
        grant = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *grant]
        self._become = become if uid else []
        self.environ = {
            **environ,
            "HOME": str(self.home),
            "TMPDIR": str(shared),
            "VLLM_CACHE_ROOT": str(self.home / "cache"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        for name in (RUN_DIRECTORY, "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", ENVIRONMENT):
            self.environ.pop(name, None)
        self._log = (self.home / "log").open("w")
        self._process = subprocess.Popen(
            self._command(HERE / "server_program.py", directory / "tiny"),
            env=self.environ,
            cwd=self.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def _command(self, *arguments: Any) -> list[str]:
        return [*self._become, sys.executable, *map(str, arguments)]

    def ask(self, num_tokens: int) -> None:
        assert self._process.stdin is not None
        print(num_tokens, file=self._process.stdin, flush=True)

    def answer(self) -> list[str]:
        """Return the next line that is ours: its first word, and the rest."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("READY", "TOKENS", "DIED")):
                return line.strip().split(" ", 1)
        pytest.fail("the server has ended:\n" + (self.home / "log").read_text()[-3000:])

    def status(self) -> dict[str, dict[str, Any]]:
        """Return what `ascend_opt status` shows this user: role to counter's status and pid."""
        command = self._command("-m", "ascend_opt", "status", "--json")
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=True, cwd=self.home
        )
        return {
            str(record["role"]): {"pid": record["pid"], **status}
            for record in json.loads(done.stdout)
            for status in record["passes"]
            if status["name"] == "counter"
        }

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


@pytest.fixture(scope="module")
def servers(
    directory: Path, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """Two running servers, of root and of nobody, with one directory for temporary files."""
    if os.getuid() != 0:
        pytest.skip("only root can start a server of another user")
    shared = tmp_path_factory.mktemp("shared")
    shared.chmod(0o1777)
    started: list[Server] = []
    try:
        started += [Server(directory, environ, shared, uid) for uid in (0, NOBODY)]
        assert [server.answer()[0] for server in started] == ["READY", "READY"]
        yield started
    finally:
        for server in started:
            server.end()


@pytest.fixture(scope="module")
def killed(servers: list[Server]) -> dict[str, Any]:
    """Both serve; then nobody's worker is killed while it counts, and root's serves again."""
    for server in servers:
        server.ask(20)
    served = [server.answer() for server in servers]
    before = [server.status() for server in servers]
    ours, theirs = servers
    theirs.ask(1900)
    (worker,) = [role for role, found in before[1].items() if found["state"] == "active"]
    counted = before[1][worker]["counters"]["steps"]
    deadline = time.monotonic() + 60
    while theirs.status()[worker]["counters"]["steps"] < counted + 20:
        assert time.monotonic() < deadline
    os.kill(before[1][worker]["pid"], 9)
    died = theirs.answer()
    ours.ask(20)
    return {
        "served": served,
        "before": before,
        "worker": worker,
        "died": died,
        "again": ours.answer(),
        "after": [server.status() for server in servers],
        "left": sorted(p.name for p in ours.home.parent.glob(f"ascend_opt-{NOBODY}/*")),
    }


@pytest.mark.extended
def test_two_servers_of_two_users_see_each_their_own(killed: dict[str, Any]) -> None:
    """Equal tokens; `status` of one shows no process of the other, and both are active."""
    ours, theirs = ({found["pid"] for found in shown.values()} for shown in killed["before"])
    assert killed["served"][0] == killed["served"][1]
    assert ours
    assert theirs
    assert not ours & theirs
    for shown in killed["before"]:
        assert "active" in {found["state"] for found in shown.values()}


@pytest.mark.extended
def test_a_worker_that_is_killed_leaves_no_record(killed: dict[str, Any]) -> None:
    """SIGKILL: vLLM says that its engine died, `status` lists it no more, no file of it stays."""
    assert killed["died"] == ["DIED", "EngineDeadError"]
    assert killed["worker"] not in killed["after"][1]
    pids = {found["pid"] for found in killed["after"][1].values()}
    assert set(killed["left"]) <= {f"{pid}.json" for pid in pids}


@pytest.mark.extended
def test_a_killed_worker_of_one_user_is_nothing_to_the_other(killed: dict[str, Any]) -> None:
    """Their server serves the same tokens as before, and its status is whole."""
    assert killed["again"] == killed["served"][0]
    assert killed["after"][0].keys() == killed["before"][0].keys()
