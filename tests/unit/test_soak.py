"""What the soak (tests/soak) measures and judges: a soak that cannot fail shows nothing."""

import itertools
import json
import os
import random
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from soak.comparison import TOLERANCE, Comparison
from soak.memory import MIB, Held, held, slope
from soak.traffic import MAX_MODEL_LEN, Answer, Request, ask, requests
from soak.verdict import GENERATED, MAX_GROWTH, Effect, Mark, idle_passes, leaks, left_open

from ascend_opt.states import PassStatus, State

ACTIVE = {"sync-elision": Effect("held_total")}


def request(max_tokens: int = 3, cut_after: int | None = None) -> Request:
    return Request(7, 0.0, [40, 41], max_tokens, cut_after, logprobs=False)


def answer(*tokens: int, finish_reason: str | None = "length") -> Answer:
    return Answer(list(tokens), finish_reason=finish_reason)


def compared(
    asked: Request, one: Answer, other: Answer, top: dict[int, float] | None = None
) -> Comparison:
    def likeliest(tokens: list[int]) -> dict[int, float]:
        assert top is not None, "equal answers are no question"
        assert tokens == [40, 41, 50]
        return top

    comparison = Comparison()
    comparison.take(asked, one, other, likeliest)
    return comparison


def test_equal_answers_are_no_fault() -> None:
    """All tokens of both are counted as compared."""
    found = compared(request(), answer(50, 51, 52), answer(50, 51, 52))
    assert (found.tokens, found.ties, found.faults) == (3, 0, [])


def test_a_token_that_differs_is_a_fault() -> None:
    """One whose log probability is clearly below the other's, or that is not likely at all."""
    for top in ({51: -0.1, 60: -0.1 - 2 * TOLERANCE}, {51: -0.1, 61: -0.1}):
        found = compared(request(), answer(50, 51, 52), answer(50, 60, 52), top)
        assert found.faults == ["request 7 differs at token 1: 51, patched 60"]
        assert (found.tokens, found.ties) == (1, 0)


def test_equally_likely_tokens_are_a_tie() -> None:
    """It is counted, and what follows, from another token on, is not compared."""
    top = {51: -0.7, 60: -0.7 - TOLERANCE / 2}
    found = compared(request(), answer(50, 51, 52), answer(50, 60, 70), top)
    assert (found.tokens, found.ties, found.faults) == (1, 1, [])


def test_of_cancelled_requests_what_both_received_is_compared() -> None:
    """One may have had more tokens on the way than the other; a difference before is a fault."""
    cut = request(cut_after=1)
    found = compared(cut, answer(50, 51, finish_reason=None), answer(50, finish_reason=None))
    assert (found.cancelled, found.tokens, found.faults) == (1, 1, [])
    other = answer(50, 60, finish_reason=None)
    assert compared(cut, answer(50, 51, finish_reason=None), other, {51: 0.0}).faults


@pytest.mark.parametrize(
    ("short", "fault"),
    [
        (answer(50, 51), "2 of 3 tokens, finish reason length"),
        (answer(50, 51, 52, finish_reason="abort"), "3 of 3 tokens, finish reason abort"),
        (Answer(error="status 500"), "status 500"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_fault(short: Answer, fault: str) -> None:
    """Of either server: too few tokens, another end, an error."""
    whole = answer(50, 51, 52)
    assert compared(request(), whole, short).faults == [f"request 7, patched: {fault}"]
    assert compared(request(), short, whole).faults == [f"request 7, unpatched: {fault}"]


def test_log_probabilities_that_differ_are_a_fault() -> None:
    """Above the tolerance, even where every token is the same; below it they are the drift."""
    for difference, faults in ((TOLERANCE / 2, 0), (2 * TOLERANCE, 1)):
        one, other = answer(50, 51, 52), answer(50, 51, 52)
        one.logprobs = [{50: -0.1}] * 3
        other.logprobs = [{50: -0.1}, {50: -0.1 - difference}, {50: -0.1}]
        found = compared(request(), one, other)
        assert found.drift == pytest.approx(difference)
        assert len(found.faults) == faults


def series(*, leak: float, noise: float = 0.2 * MIB, seed: int = 0) -> list[Held]:
    """Return 20 minutes of samples: a warm-up, noise, a spike now and then, and a leak."""
    source = random.Random(seed)
    found = []
    for seconds in range(0, 1200, 5):
        memory = 900 * MIB + 30 * MIB * min(seconds / 300, 1) + leak * seconds / 60
        memory += source.gauss(0, noise) + (source.random() < 0.1) * 8 * MIB
        found.append(Held(seconds, int(memory), 80, 40))
    return found


def test_the_slope_is_that_of_the_leak() -> None:
    """Spikes in a tenth of the samples do not move it by more than a tenth of the bound."""
    for leak in (0.0, MAX_GROWTH, 2 * MIB):
        half = series(leak=leak)[120:]
        assert slope(half) == pytest.approx(leak, abs=0.1 * MAX_GROWTH)


def test_a_leak_is_found_and_warming_up_is_none() -> None:
    """Twice the bound is found; nothing is, where both grow, or neither."""
    flat = series(leak=0)
    assert not list(leaks(flat, series(leak=0, seed=1)))
    assert not list(leaks(series(leak=2 * MIB), series(leak=2 * MIB, seed=1)))
    (found,) = leaks(flat, series(leak=2 * MAX_GROWTH, seed=1))
    assert "MiB a minute faster" in found


def test_a_short_run_finds_large_leaks_only() -> None:
    """In the first minutes servers grow by themselves, and not equally."""
    flat, grown = (series(leak=leak)[:36] for leak in (0, 10 * MIB))
    assert not list(leaks(flat, grown))
    assert list(leaks(flat, series(leak=100 * MIB)[:36]))


def test_a_handle_or_thread_that_stays_is_found() -> None:
    """One more than after warm-up, unless the unpatched twin has one more as well."""
    before = Held(300, 0, 80, 40)
    more, thread = Held(1200, 0, 81, 40), Held(1200, 0, 80, 41)
    same = Held(1200, 0, 80, 40)
    assert not list(left_open((before, same), (before, same)))
    assert not list(left_open((before, more), (before, more)))
    assert [*left_open((before, same), (before, more))] == [
        "the patched server has 1 handles more than after warm-up, its twin 0"
    ]
    assert len(list(left_open((before, same), (before, thread)))) == 1


def test_what_processes_hold_is_read_from_the_system(tmp_path: Path) -> None:
    """64 MiB, a file and a thread more are seen as such."""
    before = held(os.getpid(), 0)
    kept = bytearray(os.urandom(64)) * MIB
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with (tmp_path / "file").open("w"):
        after = held(os.getpid(), 1)
    done.set()
    thread.join()
    assert 60 * MIB < after.memory - before.memory < 80 * MIB < 2 * len(kept)
    assert after.handles - before.handles == 1
    assert after.threads - before.threads == 1


def mark(seconds: float, generated: int, did: int, state: State = State.ACTIVE) -> Mark:
    metrics = Counter({GENERATED: generated, "sync-elision:held_total": did})
    return Mark(seconds, metrics, [PassStatus("sync-elision", state, "why")])


def test_a_pass_that_stops_is_found() -> None:
    """Tokens without its counter growing, or a state that is not active at any mark."""
    good = [mark(0, 10, 1), mark(30, 500, 40), mark(60, 500, 40), mark(90, 900, 80)]
    assert not list(idle_passes(good, ACTIVE))
    assert [*idle_passes([*good, mark(120, 1300, 80)], ACTIVE)] == [
        "sync-elision did nothing from 90 to 120 s: held_total stays at 80"
    ]
    assert [*idle_passes([*good, mark(120, 1300, 90, State.FAILED)], ACTIVE)] == [
        "sync-elision at 120 s: failed: why"
    ]


def test_the_load_is_what_it_says() -> None:
    """Equal seeds, equal requests; all fit the model; short, long, cancelled and bursts occur."""
    drawn = list(itertools.islice(requests(seed=3, rate=2.0), 2000))
    assert drawn == list(itertools.islice(requests(seed=3, rate=2.0), 2000))
    assert drawn != list(itertools.islice(requests(seed=4, rate=2.0), 2000))
    assert all(len(r.prompt) + r.max_tokens < MAX_MODEL_LEN for r in drawn)
    assert all(r.cut_after is None or r.cut_after < r.max_tokens for r in drawn)
    assert sum(r.cut_after is not None for r in drawn) == pytest.approx(300, rel=0.3)
    assert sum(len(r.prompt) > 64 for r in drawn) == pytest.approx(600, rel=0.2)
    assert sum(r.after for r in drawn) == pytest.approx(1000, rel=0.2)
    assert sum(r.after == 0 for r in drawn) > 500


@contextmanager
def streaming(events: list[Any], seen: list[Any]) -> Iterator[str]:
    """Serve the same events to each request; notes the request, and whether it was cut."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            try:
                for event in events:
                    text = event if isinstance(event, str) else json.dumps(event)
                    self.wfile.write(f"data: {text}\n\n".encode())
                    # The other side's close is seen at a later write: there are plenty.
            except ConnectionError:
                seen.append("cut")

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = False
        block_on_close = True

    assert issubclass(Server, socketserver.ThreadingMixIn)
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def chunk(token: int, finish_reason: str | None = None) -> dict[str, Any]:
    top = [{f"token_id:{token}": -0.5, "token_id:99": -1.5}]
    choice = {
        "token_ids": [token],
        "finish_reason": finish_reason,
        "logprobs": {"top_logprobs": top},
    }
    return {"choices": [choice]}


def test_an_answer_is_read_to_its_end() -> None:
    """Tokens, log probabilities and the reason to stop, token by token."""
    seen: list[Any] = []
    with streaming([chunk(50), chunk(51), chunk(52, "length"), "[DONE]"], seen) as address:
        found = ask(address, request())
    assert (found.tokens, found.finish_reason, found.error) == ([50, 51, 52], "length", "")
    assert found.logprobs[2] == {52: -0.5, 99: -1.5}
    assert (seen[0]["prompt"], seen[0]["max_tokens"], seen[0]["stream"]) == ([40, 41], 3, True)


@pytest.mark.parametrize("cut_after", [0, 2])
def test_a_cut_closes_the_connection(cut_after: int) -> None:
    """After as many tokens as asked for; the server notices while it still writes."""
    seen: list[Any] = []
    with streaming([chunk(50)] * 100_000, seen) as address:
        found = ask(address, request(100_000, cut_after))
    assert found.tokens == [50] * cut_after
    assert seen[1:] == ["cut"]


def test_an_error_in_the_stream_is_the_answers() -> None:
    """The server's own error event, and a server that is not there."""
    with streaming([chunk(50), {"error": {"message": "dead"}}], []) as address:
        assert "dead" in ask(address, request()).error
    assert "refused" in ask(address, request()).error
