"""vLLM's server of a model on the CPU."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import http_server

START_SECONDS = 300


@contextmanager
def serving(model: str, log: Path, environ: Mapping[str, str], *options: str) -> Iterator[str]:
    """Give the address of a server that answers; it ends with all that it started."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "tiny", "--enforce-eager", "--max-model-len", "256"]
    command += ["--max-num-seqs", "4", *options]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", **environ}
    with http_server.running(command, log, settings, START_SECONDS) as address:
        yield address


def complete(address: str, prompt: str, max_tokens: int) -> str:
    choice = http_server.complete(address, model="tiny", prompt=prompt, max_tokens=max_tokens)
    text: str = choice["text"]
    return text
