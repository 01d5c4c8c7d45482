import json
import math
from collections.abc import Callable, Sequence

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

from ascend_opt.proof.bisect import smallest

Invoke = Callable[..., Result]
pytest_plugins = ("light",)
ALL = [f"--enable={name}" for name in ("right", "first", "wrong-layer", "second", "idle")]


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_the_smallest_set_is_exactly_the_culprits(drawn: tuple[int, set[int]]) -> None:
    """Where a set is wrong if it holds all culprits, just those are found, in their order."""
    count, culprits = drawn
    if not culprits:
        return
    found = smallest(range(count), lambda items: culprits <= set(items))
    assert found == tuple(sorted(culprits))


@given(st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=3))
def test_the_set_is_minimal_whatever_is_wrong(causes: list[set[int]]) -> None:
    """With several causes, one is found, and nothing can be left out of it."""

    def is_wrong(items: Sequence[int]) -> bool:
        return any(cause <= set(items) for cause in causes)

    found = smallest(range(8), is_wrong)
    assert is_wrong(found)
    assert not any(is_wrong([i for i in found if i != left_out]) for left_out in found)


def test_one_culprit_takes_logarithmically_many_runs() -> None:
    """Engines are slow to start: one culprit among 64 takes at most two runs a halving."""
    asked: list[Sequence[int]] = []

    def is_wrong(items: Sequence[int]) -> bool:
        asked.append(items)
        return 41 in items

    assert smallest(range(64), is_wrong) == (41,)
    assert len(asked) <= 2 * math.log2(64)


def test_nothing_is_asked_twice() -> None:
    """A set that was tried is remembered."""
    asked: list[tuple[int, ...]] = []

    def is_wrong(items: Sequence[int]) -> bool:
        asked.append(tuple(items))
        return {1, 4, 6} <= set(items)

    smallest(range(8), is_wrong)
    assert len(asked) == len(set(asked))


def bisected(result: Result) -> dict[str, object]:
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_a_pass_that_is_wrong_in_one_layer_is_found(light_vllm: Invoke) -> None:
    """One culprit among four passes, and of its two targets the wrong one."""
    passes = [item for item in ALL if not item.endswith("second")]
    result = light_vllm("bisect", *passes, "--json")
    found = bisected(result)
    assert found["passes"] == ["wrong-layer"]
    assert found["targets"] == [["wrong-layer", "vllm.model:Layer.forward"]]
    # A numbered line for each run, as it goes.
    trials = found["trials"]
    assert isinstance(trials, list)
    for trial in trials:
        assert f"bisect: {trial['number']}: " in result.stderr
    assert "WRONG: prompt 1, token 1" in result.stderr


def test_a_difference_in_shadow_mode_counts_as_wrong(light_vllm: Invoke) -> None:
    """Its tokens are right, and still it is the culprit, at the target where it differs."""
    result = light_vllm("bisect", "--enable=wrong-layer:mode=shadow", "--json")
    found = bisected(result)
    assert found["targets"] == [["wrong-layer", "vllm.model:Layer.forward"]]
    assert "in shadow, it differs from the original: x (1 of 1 values)" in str(found["last"])


def test_a_pass_that_crashes_the_engine_is_found(light_vllm: Invoke) -> None:
    """An engine that dies counts as wrong, and the line says how it died."""
    result = light_vllm("bisect", "--enable=right", "--enable=crash", "--enable=idle", "--json")
    found = bisected(result)
    assert found["passes"] == ["crash"]
    assert "ended with signal 11" in str(found["last"])


def test_passes_that_are_wrong_only_together_are_found(light_vllm: Invoke) -> None:
    """Each is right by itself: the smallest culprit is the pair."""
    passes = [item for item in ALL if not item.endswith("wrong-layer")]
    result = light_vllm("bisect", *passes)
    assert result.exit_code == 1, result.output
    assert "CULPRIT: first and second together" in result.stdout


def test_nothing_wrong_is_exit_0_and_says_what_was_not_on(light_vllm: Invoke) -> None:
    """No culprit; but a pass that never ran was not shown to be right."""
    result = light_vllm("bisect", "--enable=right", "--enable=idle")
    assert result.exit_code == 0
    assert "NO CULPRIT: nothing is wrong with right, idle" in result.stdout
    assert "idle: active in the worker of rank 0, but it never ran there" in result.stdout


@pytest.mark.parametrize(("limit", "exit_code"), [(2, 0), (3, 1)])
def test_the_limit_finds_the_same_patch_by_hand(
    light_vllm: Invoke, monkeypatch: pytest.MonkeyPatch, limit: int, exit_code: int
) -> None:
    """With the limit below the wrong patch tokens are right; with it included they are not."""
    monkeypatch.setenv("VLLM_ASCEND_OPT_BISECT_LIMIT", str(limit))
    result = light_vllm("verify", "--enable=right", "--enable=wrong-layer")
    assert result.exit_code == exit_code, result.output
