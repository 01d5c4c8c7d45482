"""One soak: the load on both servers, the samples and the progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from soak import verdict
from soak.comparison import Comparison
from soak.memory import MIB, Held
from soak.traffic import Answer, Request, ask
from soak.twins import Twin
from soak.verdict import PREEMPTIONS, Effect, Mark

SAMPLE_SECONDS = 5
MARK_SECONDS = 30
WARM_UP = 0.25  # of the time
SETTLE_SECONDS = 5  # until sockets are closed and records are written
HEADING = f"{'':>5} {'done':>6} {'cut':>5} {'tokens':>8} {'ties':>4} {'faults':>6}"
HEADING += f" {'preempted':>11} {'memory, MiB':>15}  what the passes did since"


class ServerGoneError(Exception):
    """A server does not answer any more."""


class Soak:
    """One soak; its results are there while it runs and stay when it is interrupted.

    Args:
        unpatched: The twin without passes.
        patched: The other.
        active: See `Engine.active`.
        minutes: For how long requests arrive.
        outstanding: See `Engine.outstanding`.
        pool: Has two threads for each of these pairs.
        say: Called with each line of progress.
    """

    def __init__(
        self,
        unpatched: Twin,
        patched: Twin,
        active: Mapping[str, Effect],
        minutes: float,
        outstanding: int,
        pool: ThreadPoolExecutor,
        say: Callable[[str], None],
    ) -> None:
        self.unpatched, self.patched = unpatched, patched
        self.active = active
        self.comparison = Comparison()
        self.marks: list[Mark] = []
        self.idle: list[tuple[Held, Held]] = []  # of both, after warm-up and in the end
        self.preemptions: dict[str, int] = {}
        self._seconds = 60 * minutes
        self._outstanding = outstanding
        self._pool, self._say = pool, say
        self._running: list[tuple[Request, Future[Answer], Future[Answer]]] = []
        self._begun = time.monotonic()
        self._next_sample = self._next_mark = 0.0

    def run(self, load: Iterable[Request]) -> None:
        """Send requests until the time is over, and wait for the last.

        Raises:
            ServerGoneError: A server does not answer.
        """
        self._say(HEADING)
        self._begun = time.monotonic()
        due = 0.0
        for request in load:
            # A burst that did not fit does not make the next one come at once.
            due = max(due, self._now()) + request.after
            self._until(due)
            if self._now() >= self._seconds:
                break
            if not self.idle and self._now() >= WARM_UP * self._seconds:
                self._rest()
            self._while(lambda: len(self._running) >= self._outstanding)
            twins = self.unpatched, self.patched
            one, other = (self._pool.submit(ask, t.server.address, request) for t in twins)
            self._running.append((request, one, other))
        self._rest()
        self._mark()

    def findings(self) -> Iterator[str]:
        """Yield all that is wrong so far."""
        yield from self.comparison.faults
        for twin in (self.unpatched, self.patched):
            yield from (f"{twin.name} server: {line}" for line in twin.trouble())
        yield from verdict.idle_passes(self.marks, self.active)
        yield from verdict.leaks(self.unpatched.samples, self.patched.samples)
        if len(self.idle) == 2:
            unpatched, patched = zip(*self.idle, strict=True)
            yield from verdict.left_open(unpatched, patched)
        yield from verdict.not_exercised(self.comparison.cancelled, self.preemptions)

    def _now(self) -> float:
        return time.monotonic() - self._begun

    def _while(self, waiting: Callable[[], bool]) -> None:
        """Do what there is to do for as long as something is waited for."""
        while True:
            self._collect()
            now = self._now()
            if now >= self._next_sample:
                self._next_sample = now + SAMPLE_SECONDS
                for twin in (self.unpatched, self.patched):
                    twin.sample(now)
            if now >= self._next_mark:
                self._next_mark = now + MARK_SECONDS
                self._mark()
            if not waiting():
                return
            time.sleep(0.02)

    def _until(self, seconds: float) -> None:
        self._while(lambda: self._now() < seconds)

    def _collect(self) -> None:
        finished = [pair for pair in self._running if pair[1].done() and pair[2].done()]
        self._running = [pair for pair in self._running if pair not in finished]
        for request, one, other in finished:
            self.comparison.take(request, one.result(), other.result(), self.unpatched.likeliest)

    def _rest(self) -> None:
        """Let both fall idle, and look at what they hold then."""
        self._while(lambda: bool(self._running))
        until = self._now() + SETTLE_SECONDS
        self._until(until)
        self.idle.append((self.unpatched.sample(until), self.patched.sample(until)))

    def _mark(self) -> None:
        for twin in (self.unpatched, self.patched):
            if not twin.healthy():
                raise ServerGoneError(f"the {twin.name} server does not answer")
        metrics = self.patched.metrics()
        self.preemptions = {
            "unpatched": self.unpatched.metrics()[PREEMPTIONS],
            "patched": metrics[PREEMPTIONS],
        }
        before = self.marks[-1].metrics if self.marks else metrics
        self.marks.append(Mark(self._now(), metrics, self.patched.passes()))
        done = metrics - before
        did = {name: done[f"{name}:{effect.counter}"] for name, effect in self.active.items()}
        self._say(self._line(did))

    def _line(self, did: Mapping[str, int]) -> str:
        c = self.comparison
        minutes, seconds = divmod(int(self._now()), 60)
        preempted = "/".join(map(str, self.preemptions.values()))
        twins = (self.unpatched, self.patched)
        memory = "/".join(f"{t.samples[-1].memory / MIB:.1f}" for t in twins if t.samples)
        return (
            f"{minutes:>2}:{seconds:02} {c.requests:>6} {c.cancelled:>5} {c.tokens:>8} {c.ties:>4} "
            f"{len(c.faults):>6} {preempted:>11} {memory:>15}  "
            + ", ".join(f"{name} {number}" for name, number in did.items())
        )
