"""The watch on engines: every worker is seen, and nothing of ours stops one by accident."""

import functools
import gc
import importlib
import sys
import threading
from types import SimpleNamespace

import pytest

from ascend_opt.engine import TARGET, Engine, EngineWatch
from ascend_opt.errors import NotApplicableError


@pytest.fixture
def base(site):
    return importlib.import_module("vllm.v1.worker.worker_base")


@pytest.fixture
def watch(site):
    seen = []
    made = EngineWatch(seen.append)
    made.seen = seen
    yield made
    made.disarm()


def test_a_worker_is_reported_with_its_config_after_its_init(site, watch):
    """Config and rank are the worker's own; it was not running before."""
    watch.arm()
    config = object()
    worker = importlib.import_module(TARGET.module).WorkerBase(config, rank=2)

    (engine,) = watch.seen

    assert (engine.config, engine.rank, engine.running) == (config, 2, False)
    assert engine.worker() is worker


@pytest.mark.parametrize(
    ("parallel", "replica"),
    [
        ({"data_parallel_index": 1, "data_parallel_rank": 0}, 1),
        ({"data_parallel_rank": 2}, 2),
        (None, 0),
    ],
)
def test_a_data_parallel_engine_says_which_it_is(parallel, replica):
    """By the index, where a dense model's engines each call themselves rank 0; 0 if alone."""
    config = SimpleNamespace(parallel_config=parallel and SimpleNamespace(**parallel))
    assert Engine(config, 0, False, lambda: None).replica == replica


def test_a_worker_of_a_frozen_heap_is_seen(base, watch):
    """When an engine is up, vLLM freezes its heap; a pass enabled later still sees the engine."""
    worker = base.WorkerBase(object())
    gc.freeze()
    try:
        watch.arm()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()

    (engine,) = watch.seen
    assert engine.worker() is worker
    assert engine.running


def test_a_subclass_that_calls_super_is_reported_once(base, watch):
    """As every worker of vLLM and vllm-ascend does."""
    watch.arm()

    class Worker(base.WorkerBase):
        def __init__(self, config):
            super().__init__(config)

    Worker(object())

    assert len(watch.seen) == 1


def test_workers_that_exist_are_reported_when_it_is_armed(base, watch):
    """As running: their model may be built."""
    worker = base.WorkerBase(object())

    watch.arm()

    (engine,) = watch.seen
    assert engine.running
    assert engine.worker() is worker


def test_looking_for_workers_touches_no_lazy_object(base, watch):
    """Objects that answer for their class by importing, or by raising, are left alone."""

    class Lazy:
        @property
        def __class__(self):
            raise AssertionError("looked at")

    lazy = Lazy()
    worker = base.WorkerBase(object())

    watch.arm()

    assert len(watch.seen) == 1
    del lazy, worker


def test_looking_for_workers_does_not_disturb_another_thread(base, watch):
    """A tuple that a thread fills while we look is finished: an engine's step cannot fail of us."""
    worker = base.WorkerBase(object())
    done, errors = threading.Event(), []

    def fill():
        while not done.is_set():
            try:
                tuple(number for number in range(3))
            except SystemError as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=fill)
    thread.start()
    for _ in range(200):
        watch.arm()
        watch.disarm()
    sys.setswitchinterval(interval)
    done.set()
    thread.join()

    assert errors == []
    assert watch.seen[-1].worker() is worker


def test_workers_of_subclasses_of_subclasses_are_seen_once(base, watch):
    """Also where a class has two bases that are workers."""

    class Left(base.WorkerBase):
        pass

    class Right(base.WorkerBase):
        pass

    class Both(Left, Right):
        pass

    workers = [Both(object()), Right(object())]

    watch.arm()

    assert sorted(map(id, workers)) == sorted(id(engine.worker()) for engine in watch.seen)


def test_arming_twice_reports_once(base, watch):
    """One wrapper, however many passes ask for it."""
    watch.arm()
    watch.arm()

    base.WorkerBase(object())

    assert len(watch.seen) == 1


def test_disarming_gives_back_the_original(base, watch):
    """The class is as it was, and can be watched again."""
    original = vars(base.WorkerBase)["__init__"]
    watch.arm()
    watch.disarm()

    assert vars(base.WorkerBase)["__init__"] is original
    watch.arm()
    base.WorkerBase(object())
    assert len(watch.seen) == 1


def test_disarming_under_someone_elses_wrapper_leaves_it_inert(base, watch):
    """Their closure keeps working; we report nothing, raise nothing, and can be armed again."""
    watch.arm()
    ours = base.WorkerBase.__init__

    @functools.wraps(ours)
    def closure(self, *args):
        ours(self, *args)

    base.WorkerBase.__init__ = closure
    watch.disarm()
    base.WorkerBase(object())
    assert watch.seen == []

    watch.arm()
    base.WorkerBase(object())
    assert len(watch.seen) == 1


def test_an_error_while_checking_does_not_stop_the_worker(base, caplog):
    """It is logged; the engine goes on."""

    def broken(engine):
        raise RuntimeError("oops")

    watch = EngineWatch(broken)
    watch.arm()

    assert base.WorkerBase("config").vllm_config == "config"

    assert "could not check the engine; it goes on" in caplog.text
    watch.disarm()


def test_a_refusal_does_stop_it(base):
    """NotApplicableError is how `policy: strict` refuses an engine."""

    def refuse(engine):
        raise NotApplicableError("strict")

    watch = EngineWatch(refuse)
    watch.arm()

    with pytest.raises(NotApplicableError, match="strict"):
        base.WorkerBase(object())
    watch.disarm()


def test_a_vllm_without_worker_base_cannot_be_checked(site):
    """Its passes are inapplicable, with that reason."""
    assert EngineWatch.unmet() is None
    site.write("vllm/v1/worker/worker_base.py", "class Other: pass\n")

    assert "has no vllm.v1.worker.worker_base:WorkerBase.__init__" in EngineWatch.unmet()
