"""``vllm serve`` on the simulated device, with an HTTP client."""

import sys
from collections.abc import Iterator
from pathlib import Path

import http_server
import pytest

from ascend_opt.simnpu.installation import Installation

START_SECONDS = 400


@pytest.fixture(scope="module")
def server(
    installation: Installation, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server started as a user would start it; stopped with its children."""
    log = tmp_path_factory.mktemp("serve") / "log"
    options = "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8"
    options += " --max-num-batched-tokens 128 --gpu-memory-utilization 0.2"
    options += " --num-gpu-blocks-override 64"
    command = [sys.executable, "-m", "ascend_opt.simnpu", "run", "--", "vllm", "serve"]
    command += [str(tiny_model), *options.split()]
    environ = {"HF_HUB_OFFLINE": "1", "VLLM_ASCEND_OPT": "off"}
    with http_server.running(command, log, environ, START_SECONDS) as address:
        yield address


def _complete(address: str, tokens: list[int]) -> list[int]:
    choice = http_server.complete(address, prompt=tokens, max_tokens=16, return_token_ids=True)
    result: list[int] = choice["token_ids"]
    return result


def test_served_completions_equal_stock_vllm(server: str, expected: dict[str, list[int]]) -> None:
    """Over HTTP, the first 16 tokens of two prompts are those of stock CPU vLLM."""
    from npu import engine_program

    for index in (1, 3):
        prompt = engine_program.prompt(index)["prompt_token_ids"]
        assert _complete(server, prompt) == expected[str(index)][:16]
