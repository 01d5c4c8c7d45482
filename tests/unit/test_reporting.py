"""Records: private, atomic, of live processes only, and never the engine's problem."""

import errno
import itertools
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from unit.conftest import GREETER

from ascend_opt import reporting
from ascend_opt.errors import RecordsError
from ascend_opt.reporting import Reporter, read_records, run_directory, started_at
from ascend_opt.states import PassStatus, State, TargetStatus

STATUS = PassStatus(
    "p", State.ACTIVE, "does it", {"n": 1}, (TargetStatus("m:f", "v", True),), {"steps": 1}, 7
)


@pytest.fixture
def reporter():
    made = Reporter(lambda: ((STATUS,), 3, 1), lambda: None)
    yield made
    made.close()


REST = '"parent": 1, "role": "", "rank": 0, "replica": 0'


def record_file():
    return run_directory() / f"{os.getpid()}.json"


def write_record(pid, started, name=None, **changes):
    directory = run_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    data = {"pid": pid, "started": started, "parent": 1, "role": "Worker", "rank": 0}
    data["replica"] = 0
    data |= {"updated": 1.0, "passes": [], **changes}
    path = directory / (name or f"{pid}.json")
    path.write_text(json.dumps(data))
    return path


def test_a_record_reads_back_as_it_was_written(reporter):
    """Process, rank and every status survive the file."""
    reporter.write()

    (record,) = read_records()

    assert record.passes == (STATUS,)
    process = record.process
    assert (process.pid, process.role) == (os.getpid(), "main")
    assert (process.rank, process.replica) == (3, 1)


def test_a_process_has_a_parent_and_one_that_is_not_there_has_none():
    """What links a worker's record to its server, where a process between them has none."""
    assert reporting.parent_of(os.getpid()) == os.getppid()
    assert reporting.parent_of(2**22 + 1) is None  # beyond the kernel's largest


def test_a_worker_of_ray_is_called_so(reporter, monkeypatch):
    """A process that Ray started has no name by multiprocessing; its program tells."""
    monkeypatch.setattr("sys.argv", ["/site-packages/ray/_private/workers/default_worker.py", "-x"])
    reporter.write()
    assert read_records()[0].process.role == "RayWorker"


def test_the_directory_and_the_record_are_private(reporter):
    """0700 and 0600, whatever the umask."""
    old = os.umask(0)
    try:
        reporter.write()
    finally:
        os.umask(old)

    assert stat.S_IMODE(run_directory().stat().st_mode) == 0o700
    assert stat.S_IMODE(record_file().stat().st_mode) == 0o600


def test_a_directory_that_others_may_write_to_is_not_used_and_not_changed(reporter, caplog):
    """`/tmp` itself as the run directory: a warning; its mode stays, nothing is written."""
    run_directory().mkdir()
    run_directory().chmod(0o1777)

    reporter.write()

    assert "others may write to" in caplog.text
    assert stat.S_IMODE(run_directory().stat().st_mode) == 0o1777
    assert list(run_directory().iterdir()) == []
    with pytest.raises(RecordsError, match=r"others may write to .*mode 1777"):
        read_records()


def test_a_symlink_in_place_of_the_directory_is_not_followed(reporter, tmp_path, caplog):
    """Someone else could have put it there."""
    (tmp_path / "elsewhere").mkdir()
    run_directory().symlink_to(tmp_path / "elsewhere")

    reporter.write()

    assert "belongs to another user or is no directory" in caplog.text
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with pytest.raises(PermissionError, match="set VLLM_ASCEND_OPT_RUN_DIR"):
        read_records()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_costs_one_warning(reporter, monkeypatch, caplog, code):
    """However often it is tried; nothing is raised, and no partial file stays."""

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(reporting.os, "fdopen", fail)
    for _ in range(3):
        reporter.write()

    assert caplog.text.count("no record of this process") == 1
    assert list(run_directory().glob("*.json")) == []


def test_each_time_that_records_cannot_be_written_is_said(monkeypatch, caplog):
    """A disk that was full, had room again and is full again: two warnings."""
    numbers = itertools.count()
    busy = Reporter(
        lambda: ((PassStatus("p", State.OFF, str(next(numbers))),), None, None), lambda: None
    )
    directory = str(run_directory())
    for turn in (1, 2):
        monkeypatch.setenv(reporting.ENVIRONMENT, "/proc/nowhere")
        for _ in range(3):
            busy.write()
        assert caplog.text.count("no record of this process") == turn
        monkeypatch.setenv(reporting.ENVIRONMENT, directory)
        busy.write()
        assert record_file().exists()
    busy.close()


def test_a_directory_that_cannot_be_made_costs_one_warning(reporter, tmp_path, monkeypatch, caplog):
    """A file in its path: `status` is blind, the engine lives."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(reporting.ENVIRONMENT, str(tmp_path / "file" / "run"))

    reporter.write()
    reporter.write()

    assert caplog.text.count("no record of this process") == 1
    assert read_records() == []


def test_a_reader_never_sees_half_a_record(reporter):
    """Writes replace the file: a reader in between gets the old or the new one."""
    texts = iter(range(10_000))
    busy = Reporter(
        lambda: ((PassStatus("p", State.OFF, "x" * 4000 + str(next(texts))),), None, None),
        lambda: None,
    )
    busy.write()
    stop = threading.Event()

    def write():
        while not stop.is_set():
            busy.write()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert all(len(read_records()) == 1 for _ in range(200))
    finally:
        stop.set()
        thread.join()
        busy.close()


def test_the_record_of_a_dead_process_is_removed():
    """A pid that is no more, and one that belongs to a later process by now."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead = write_record(child.pid, 5)
    reused = write_record(os.getppid(), started_at(os.getppid()) + 1)
    live = write_record(os.getpid(), started_at(os.getpid()))

    assert [r.process.pid for r in read_records()] == [os.getpid()]

    assert not dead.exists()
    assert not reused.exists()
    assert live.exists()


def test_a_zombie_counts_as_dead():
    """A process that ended and was not waited for has nothing on any more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = started_at(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert started is not None
    assert started_at(child.pid) is None
    child.wait()


OTHER_USER = 65534  # nobody
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@as_root
def test_a_directory_of_another_user_is_not_read():
    """They may have put records there for us to find."""
    path = write_record(os.getpid(), started_at(os.getpid()))
    os.chown(run_directory(), OTHER_USER, OTHER_USER)

    with pytest.raises(RecordsError, match=r"belongs to another user.*VLLM_ASCEND_OPT_RUN_DIR"):
        read_records()
    assert path.exists()


@as_root
def test_a_record_of_another_user_is_ignored_and_left():
    """A file in our directory that is not ours says nothing, of a dead process neither."""
    ours = write_record(os.getpid(), started_at(os.getpid()))
    os.chown(ours, OTHER_USER, OTHER_USER)
    dead = write_record(999_999_999, 1)
    os.chown(dead, OTHER_USER, OTHER_USER)

    assert read_records() == []
    assert ours.exists()
    assert dead.exists()


@as_root
def test_a_record_of_another_users_process_is_not_shown():
    """The pid is alive and started then, but it is not a process of ours."""
    theirs = subprocess.Popen(["sleep", "60"], user=OTHER_USER, group=OTHER_USER, extra_groups=[])
    try:
        write_record(theirs.pid, started_at(theirs.pid))
        ours = write_record(os.getpid(), started_at(os.getpid()))
        assert [record.process.pid for record in read_records()] == [os.getpid()]
        assert ours.exists()
    finally:
        theirs.kill()
        theirs.wait()


def test_a_huge_file_is_ignored_and_not_read_to_its_end():
    """A sparse file of 64 GiB under our own name."""
    path = write_record(os.getpid(), started_at(os.getpid()))
    os.truncate(path, 64 << 30)

    assert read_records() == []
    assert path.exists()


def test_a_pipe_under_a_live_pid_does_not_block():
    """Nobody will ever write to it."""
    run_directory().mkdir(mode=0o700)
    os.mkfifo(record_file())

    assert read_records() == []


def test_a_link_to_a_valid_record_is_not_followed(tmp_path):
    """It leads out of the directory that is ours alone."""
    path = write_record(os.getpid(), started_at(os.getpid()))
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")

    assert read_records() == []


ENTRY = STATUS.as_dict()
TARGET = ENTRY["targets"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {"role": ["Worker"]},
        {"rank": "0"},
        {"replica": "0"},
        {"parent": None},
        {"updated": "soon"},
        {"passes": [ENTRY | {"name": 3}]},
        {"passes": [ENTRY | {"reason": None}]},
        {"passes": [ENTRY | {"state": "on"}]},
        {"passes": [ENTRY | {"pid": "7"}]},
        {"passes": [ENTRY | {"counters": ["steps"]}]},
        {"passes": [ENTRY | {"counters": {"steps": "many"}}]},
        {"passes": [ENTRY | {"parameters": 3}]},
        {"passes": [ENTRY | {"targets": [TARGET | {"note": {}}]}]},
        {"passes": [ENTRY | {"targets": [TARGET | {"variant": 1}]}]},
        {"passes": [ENTRY | {"surprise": 1}]},
    ],
    ids=str,
)
def test_a_record_with_a_value_of_another_type_is_ignored(changes):
    """What is shown is what a process of ours could have written, or nothing."""
    good = {"passes": [ENTRY]}
    write_record(os.getpid(), started_at(os.getpid()), **good)
    assert len(read_records()) == 1

    write_record(os.getpid(), started_at(os.getpid()), **{**good, **changes})

    assert read_records() == []


def test_status_names_a_directory_that_it_does_not_trust(tmp_path):
    """`ascend_opt status` is one line and exit code 2, no traceback."""
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)

    done = subprocess.run(
        [sys.executable, "-m", "ascend_opt", "status"],
        env={**os.environ, reporting.ENVIRONMENT: str(directory)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: others may write to {directory} (mode 0777); set VLLM_")
    assert "Traceback" not in done.stderr


WRITER = """
import itertools
from ascend_opt.reporting import Reporter
from ascend_opt.states import PassStatus, State
numbers = itertools.count()
reporter = Reporter(
    lambda: ([PassStatus("p", State.ACTIVE, "x" * 20_000, counters={"n": next(numbers)})], 0, 0),
    lambda: None,
)
reporter.write()
print("writing", flush=True)
while True:
    reporter.write()
"""


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_behind():
    """SIGKILL at any time: a reader sees whole records, then none, and the directory is empty."""
    halves = turn = 0
    while turn < 12 or (not halves and turn < 100):
        turn += 1
        writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE)
        try:
            assert writer.stdout.readline() == b"writing\n"
            time.sleep(0.003 * (turn % 12))
            (record,) = read_records()
            assert record.passes[0].counters["n"] >= 0
        finally:
            writer.kill()
            writer.communicate()
        halves += len([p for p in run_directory().iterdir() if p.name.startswith(".")])
        assert read_records() == []
        assert list(run_directory().iterdir()) == []
    assert halves  # else no kill hit a write, and this test says nothing


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "not json",
        "[" * 100_000,
        '{"pid": 1}',
        f'{{"pid": "../1", "started": null, {REST}, "passes": []}}',
        f'{{"pid": 1, "started": 1, {REST}, "updated": 0, "passes": [3]}}',
        f'{{"pid": 1, "started": 1, {REST}, "updated": 0, "passes": 3}}',
    ],
)
def test_what_is_no_record_is_ignored_and_left(text):
    """Foreign and broken files are neither an error nor ours to delete."""
    run_directory().mkdir(mode=0o700)
    path = run_directory() / "1.json"
    path.write_text(text)

    assert read_records() == []
    assert path.read_text() == text


def test_a_record_under_a_wrong_name_is_ignored_and_left():
    """Only `PID.json` of a dead PID is deleted."""
    path = write_record(999_999_999, 1, name="notes.json")

    assert read_records() == []
    assert path.exists()


def test_a_pipe_and_a_symlink_among_the_records_are_ignored(tmp_path):
    """Reading must not block or be led elsewhere."""
    run_directory().mkdir(mode=0o700)
    os.mkfifo(run_directory() / "1.json")
    target = tmp_path / "2.json"
    target.write_text("{}")
    (run_directory() / "2.json").symlink_to(target)

    assert read_records() == []


def test_nothing_is_written_while_nothing_changes(reporter):
    """The file of an idle process is left alone."""
    reporter.write()
    before = record_file().stat().st_mtime_ns, record_file().stat().st_ino

    reporter.write()

    assert (record_file().stat().st_mtime_ns, record_file().stat().st_ino) == before


def test_close_removes_the_record_and_it_stays_away(reporter):
    """A thread that was about to write does not bring it back."""
    entered, go = threading.Event(), threading.Event()

    def snapshot():
        entered.set()
        go.wait(10)
        return (STATUS,), None, None

    slow = Reporter(snapshot, lambda: None)
    slow.start()
    thread = slow._thread
    entered.wait(10)
    slow.close()
    go.set()
    thread.join(10)

    assert not thread.is_alive()
    assert not record_file().exists()


def test_starting_twice_is_one_thread(reporter):
    """However many passes and threads ask for it."""
    before = threading.active_count()
    for _ in range(20):
        reporter.start()

    assert threading.active_count() == before + 1


def test_a_file_system_that_hangs_holds_up_no_caller(reporter, monkeypatch):
    """While a write blocks, `start`, which import hooks call, returns at once."""
    entered, go = threading.Event(), threading.Event()

    def hang(path, text):
        entered.set()
        go.wait(30)

    monkeypatch.setattr(reporting, "_replace", hang)
    reporter.start()
    entered.wait(10)
    caller = threading.Thread(target=reporter.start, daemon=True)
    caller.start()
    caller.join(10)

    assert not caller.is_alive()
    go.set()


def test_an_error_in_the_snapshot_is_said_once_and_passes(monkeypatch, caplog):
    """Whatever it was, the record is written again as soon as that is possible."""
    monkeypatch.setattr(reporting, "INTERVAL_S", 0.01)
    turns = iter(range(10_000))

    def snapshot():
        if next(turns) < 5:
            raise RuntimeError("oops")
        return (STATUS,), None, None

    broken = Reporter(snapshot, lambda: None)
    broken.start()
    deadline = time.monotonic() + 10
    while not read_records():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    broken.close()

    assert caplog.text.count("no new record of this process; passes go on") == 1
    assert "RuntimeError: oops" in caplog.text


def test_a_process_writes_its_record_and_removes_it_at_exit(site):
    """Visible while it lives, gone afterwards."""
    site.distribution("test-greeter", "test_greeter", GREETER)

    site.run(
        """
        import os, time, ascend_opt
        from ascend_opt import reporting
        ascend_opt.enable("greeter")
        deadline = time.monotonic() + 20
        while not (found := reporting.read_records()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert found[0].process.pid == os.getpid()
        assert found[0].passes[0].state == "armed"
        """
    )

    assert list(run_directory().iterdir()) == []


def test_a_forked_child_writes_a_record_of_its_own(site):
    """Its own pid and counters, and the parent's record stays the parent's."""
    site.distribution("test-greeter", "test_greeter", GREETER)

    site.run(
        """
        import os, time, ascend_opt
        from ascend_opt import reporting

        def wait_for(number):
            deadline = time.monotonic() + 20
            while len(found := reporting.read_records()) != number:
                assert time.monotonic() < deadline, found
                time.sleep(0.01)
            return {r.process.pid: r for r in found}

        ascend_opt.enable("greeter")
        wait_for(1)
        end, stop = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(stop)
            os.read(end, 1)
            os._exit(0)
        records = wait_for(2)
        assert set(records) == {os.getpid(), child}, records
        assert records[child].process.parent == os.getpid()
        os.write(stop, b"x")
        os.waitpid(child, 0)
        assert set(wait_for(1)) == {os.getpid()}
        """
    )


def test_where_records_go_by_default(monkeypatch, tmp_path):
    """XDG_RUNTIME_DIR, else a directory of the user's in the temporary one."""
    monkeypatch.delenv(reporting.ENVIRONMENT)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_directory() == tmp_path / "ascend_opt"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr(reporting.tempfile, "tempdir", str(tmp_path))

    assert run_directory() == Path(tmp_path) / f"ascend_opt-{os.getuid()}"
