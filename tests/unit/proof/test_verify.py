import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
from outcomes import FakeRunner, outcome, record

from ascend_opt import Mode, preview
from ascend_opt.proof.engine_run import EngineRunError, Outcome
from ascend_opt.proof.junit import junit
from ascend_opt.proof.verify import Verdict, Verification, verify

PASS = "mlp-prefetch"
REQUESTS = {PASS: preview.parse_enable(f"{PASS}:backend=record")}
ON = [record((PASS, "active", {"steps": 2, "held": 2, "prefetches": 8}))]


def verified(
    patched: Callable[[], Outcome], *unpatched: Outcome
) -> tuple[Verification, FakeRunner]:
    left = list(unpatched)
    runner = FakeRunner(lambda requests: patched() if requests else left.pop(0))
    return verify(runner, REQUESTS, ["a", "b"]), runner  # type: ignore[arg-type]


def died() -> Outcome:
    raise EngineRunError("ended with signal 11\nthe tail of the log")


def test_equal_tokens_with_the_pass_on_pass() -> None:
    """Equal in three runs, and the pass did its work: the one way to pass."""
    run = outcome([65], [66])
    found, runner = verified(lambda: outcome([65], [66], records=ON), run, run)
    assert found.passed
    assert found.reason == "2 of 2 tokens equal"
    assert [list(asked) for asked in runner.asked] == [[PASS], [], []]


def test_a_different_token_fails() -> None:
    """One wrong token is reported with prompt, position and both tokens."""
    run = outcome([65], [66])
    found, _ = verified(lambda: outcome([65], [67], records=ON), run, run)
    assert found.verdict is Verdict.DIFFERENT
    first = found.as_dict()["first_difference"]
    assert (first["prompt"], first["position"]) == (1, 0)
    assert (first["expected"]["token"], first["found"]["token"]) == (66, 67)


def test_equal_logprobs_are_part_of_being_right() -> None:
    """Equal tokens whose logprobs are out of tolerance fail."""
    run = outcome([65], [66])
    found, _ = verified(lambda: outcome([65], [66], logprob=-0.6, records=ON), run, run)
    assert found.verdict is Verdict.DIFFERENT
    assert "logprobs" in found.reason


@pytest.mark.parametrize("records", [[], [record((PASS, "active", {"steps": 2, "held": 2}))]])
def test_equal_but_nothing_was_on_is_not_a_pass(records: list[Any]) -> None:
    """If the pass was not on, or did nothing, the tokens are not even compared."""
    found, runner = verified(lambda: outcome([65], [66], records=records))
    assert found.verdict is Verdict.NOTHING_ON
    assert PASS in found.reason
    assert len(runner.asked) == 1


def shadowed(state: str, **counters: int) -> Verification:
    """Verify a pass in shadow mode that ended so; its tokens are the original's."""
    request = dataclasses.replace(REQUESTS[PASS], mode=Mode.SHADOW)
    records = [record((PASS, state, counters), mode="shadow")]
    runner = FakeRunner(lambda asked: outcome([65], [66], records=records if asked else ()))
    return verify(runner, {PASS: request}, ["a", "b"])  # type: ignore[arg-type]


def test_a_pass_in_shadow_mode_was_on_if_it_compared() -> None:
    """Equal, and the verdict says what that proves: not the tokens, the comparisons."""
    found = shadowed("active", steps=9, held=9, compared=9)
    assert found.passed
    assert "was in shadow mode: 9 calls compared, all equal" in found.reason


def test_a_pass_in_shadow_mode_that_never_compared_was_not_on() -> None:
    """Whatever else it counts."""
    found = shadowed("active", steps=9, held=9)
    assert found.verdict is Verdict.NOTHING_ON
    assert "'compared' is 0" in found.reason


def test_a_pass_in_shadow_mode_that_differs_is_different() -> None:
    """That is what it was asked; the tokens, which are equal, are not waited for."""
    found = shadowed("failed", steps=9, held=9, compared=9, differed=1)
    assert found.verdict is Verdict.DIFFERENT
    assert found.reason == f"{PASS}: process 7: because failed"


def test_noise_is_not_blamed_on_the_pass() -> None:
    """A prompt on which unpatched runs differ decides nothing: undecided, and not a pass."""
    found, _ = verified(
        lambda: outcome([65], [69], records=ON), outcome([65], [66]), outcome([65], [67])
    )
    assert found.verdict is Verdict.UNDECIDED
    assert not found.passed
    assert "two unpatched runs already differ on 1 prompts" in found.reason


def test_a_difference_beside_the_noise_is_blamed() -> None:
    """A prompt on which unpatched runs agree still convicts, whatever another prompt does."""
    found, _ = verified(
        lambda: outcome([64], [69], records=ON), outcome([65], [66]), outcome([65], [67])
    )
    assert found.verdict is Verdict.DIFFERENT
    assert [difference.prompt for difference in found.blamed()] == [0]


def test_an_engine_that_dies_only_with_the_pass_fails() -> None:
    """A crash under the pass is a finding, with the log, once the unpatched engine has run."""
    found, _ = verified(died, outcome([65], [66]))
    assert found.verdict is Verdict.ENGINE_DIED
    assert "the tail of the log" in found.log


def test_an_engine_that_dies_unpatched_is_not_a_finding() -> None:
    """If the engine does not run without the pass either, that is the error."""
    runner = FakeRunner(lambda _: died())
    with pytest.raises(EngineRunError):
        verify(runner, REQUESTS, ["a"])  # type: ignore[arg-type]


def test_junit_has_a_case_for_each_claim() -> None:
    """A CI server shows the engine, each pass, the noise and each prompt; failures say why."""
    run = outcome([65], [66])
    found, _ = verified(lambda: outcome([65], [67], records=ON), run, run)
    suite = ET.fromstring(junit(found).encode())
    cases = {case.get("name"): case.find("failure") for case in suite}
    assert set(cases) == {
        "the engine runs",
        f"{PASS} was on",
        "unpatched runs agree",
        "prompt 1 is equal",
        "prompt 2 is equal",
    }
    failed = [name for name, failure in cases.items() if failure is not None]
    assert failed == ["prompt 2 is equal"]
    assert suite.get("failures") == "1"


def test_the_result_is_json() -> None:
    """Everything that `--json` prints can be written as JSON."""
    run = outcome([65], [66])
    found, _ = verified(lambda: outcome([65], [67], records=ON), run, run)
    assert json.loads(json.dumps(found.as_dict()))["passed"] is False
