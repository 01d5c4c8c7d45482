"""verify from end to end: real processes, real patches, a light vLLM."""

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Invoke = Callable[..., Result]
pytest_plugins = ("light",)


def test_a_right_pass_passes(light_vllm: Invoke) -> None:
    """A third party's pass is applied in the engine's process, counts, and changes nothing."""
    result = light_vllm("verify", "--enable=right", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["activity"][0]["counters"]["steps"] == 32
    assert found["patched"]["tokens_equal"] == found["patched"]["tokens"] == 14 * 32


def test_a_wrong_pass_fails_with_the_first_difference(light_vllm: Invoke) -> None:
    """The verdict names prompt and token, and the exit code is 1."""
    result = light_vllm("verify", "--enable=wrong-layer", "--max-tokens=2")
    assert result.exit_code == 1
    assert "FAIL: different: tokens differ on 14 prompts" in result.stdout
    assert "prompt 1, token 1: unpatched" in result.stdout


def test_a_pass_that_never_ran_fails(light_vllm: Invoke) -> None:
    """Equal tokens are not even looked for."""
    result = light_vllm("verify", "--enable=idle")
    assert result.exit_code == 1
    assert "FAIL: nothing on" in result.stdout


def test_a_crash_under_a_pass_fails(light_vllm: Invoke) -> None:
    """An engine that dies with the pass, and lives without, is a finding."""
    result = light_vllm("verify", "--enable=crash")
    assert result.exit_code == 1
    assert "FAIL: engine died" in result.stdout


def test_what_vllm_does_not_take_is_exit_2(light_vllm: Invoke) -> None:
    """The message of vLLM's own parser reaches the user."""
    result = light_vllm("verify", "--enable=right", "--", "--max-model-length", "7")
    assert result.exit_code == 2
    assert "vLLM does not take these arguments" in result.stderr
    assert "--max-model-length" in result.stderr


def test_vllm_arguments_reach_the_engine(light_vllm: Invoke) -> None:
    """What stands after -- is vLLM's."""
    result = light_vllm("verify", "--enable=right", "--json", "--", "--max-model-len", "50")
    assert json.loads(result.stdout)["facts"]["engine"]["max_model_len"] == 50


def test_a_prompt_that_does_not_fit_is_exit_2(light_vllm: Invoke) -> None:
    """The message names the prompt, its length and the limit."""
    Path("p.txt").write_text("short\n" + "long" * 20 + "\n")
    result = light_vllm("verify", "--enable=right", "--prompts=p.txt")
    assert result.exit_code == 2
    assert "prompt 2 has 80 tokens, expected 1 to 32 (max_model_len=64, less 32" in result.stderr


def test_an_engine_that_does_not_start_is_exit_2(light_vllm: Invoke) -> None:
    """The tail of its log is shown, and its log is kept."""
    result = light_vllm("verify", "--enable=right", "--", "--fails")
    assert result.exit_code == 2
    assert "MemoryError: out of memory" in result.stderr
    assert "unpatched-1.log" in result.stderr.rpartition("Kept in ")[2]
