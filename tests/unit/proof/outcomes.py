"""Made outcomes and runners, so that no engine has to start."""

from collections.abc import Callable, Sequence
from typing import Any

from ascend_opt.proof.engine_run import Outcome
from ascend_opt.proof.workspace import Progress


def outcome(
    *tokens: Sequence[int], logprob: float = -0.5, records: Sequence[dict[str, Any]] = ()
) -> Outcome:
    """Return an outcome with one candidate beside each chosen token."""
    return Outcome(
        tokens=[list(row) for row in tokens],
        records=list(records),
        start_s=1.0,
        generate_s=2.0,
        logprobs=[
            [[[token, logprob, chr(token)], [token + 1, -3.0, chr(token + 1)]] for token in row]
            for row in tokens
        ],
        prompt_tokens=[3 for _ in tokens],
    )


def record(
    *passes: tuple[str, str, dict[str, int]],
    rank: int | None = 0,
    pid: int = 7,
    mode: str = "active",
) -> dict[str, Any]:
    """Return a process's record with passes of name, state and counters."""
    return {
        "pid": pid,
        "role": "Worker",
        "rank": rank,
        "passes": [
            {
                "name": name,
                "state": state,
                "reason": f"because {state}",
                "counters": counters,
                "mode": mode,
            }
            for name, state, counters in passes
        ],
    }


class FakeRunner:
    """Answers from a function of the passes that are on, and remembers what was asked."""

    def __init__(self, answer: Callable[[dict[str, Any]], Outcome]) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.progress = Progress("test", live=False)

    def generate(
        self, name: str, text: str, requests: Any, prompts: Any, max_tokens: int
    ) -> Outcome:
        self.asked.append(dict(requests))
        return self.answer(dict(requests))
