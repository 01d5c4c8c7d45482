"""Two servers of one model, an unpatched one and a patched one."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import http_server
from prometheus_client.parser import text_string_to_metric_families
from soak.engines import Engine
from soak.memory import Held, held
from soak.traffic import likeliest

from ascend_opt import reporting
from ascend_opt.config import ENVIRONMENT
from ascend_opt.metrics import PREFIX
from ascend_opt.states import PassStatus

START_SECONDS = 600
_TROUBLE = re.compile(rb"\b(ERROR|CRITICAL)\b|Traceback")


@dataclass
class Twin:
    """One of the two servers.

    Attributes:
        name: `unpatched` or `patched`.
        server: Where it is.
        log: What it and its processes print.
        records: The directory of its processes' records.
        started: Bytes of the log that were written before it was up.
        samples: What its processes held, in order.
    """

    name: str
    server: http_server.Server
    log: Path
    records: Path
    started: int
    samples: list[Held] = field(default_factory=list)

    def sample(self, seconds: float) -> Held:
        """Take a sample and return it."""
        self.samples.append(held(self.server.pid, seconds))
        return self.samples[-1]

    def metrics(self) -> Counter[str]:
        """Return its metrics by name, `pass:name` for a pass's own, each added up over labels."""
        with urllib.request.urlopen(f"{self.server.address}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found: Counter[str] = Counter()
        for sample in (sample for family in families for sample in family.samples):
            owner = f"{sample.labels['pass']}:" if sample.name.startswith(PREFIX) else ""
            found[owner + sample.name.removeprefix(f"{PREFIX}_")] += int(sample.value)
        return found

    def passes(self) -> list[PassStatus]:
        """Return the passes of its worker."""
        records = reporting.read_records(self.records)
        workers = [record for record in records if record.process.rank is not None]
        return [status for record in workers for status in record.passes]

    def healthy(self) -> bool:
        """Return whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.server.address}/health", timeout=60):
                return True
        except OSError:
            return False

    def trouble(self) -> list[str]:
        """Return what it printed of errors since it was up."""
        with self.log.open("rb") as file:
            file.seek(self.started)
            return [line.decode(errors="replace").strip() for line in file if _TROUBLE.search(line)]

    def likeliest(self, tokens: list[int]) -> dict[int, float]:
        """Return the likeliest tokens after some, with their log probabilities."""
        choice = http_server.complete(
            self.server.address,
            prompt=tokens,
            max_tokens=1,
            logprobs=5,
            return_tokens_as_token_ids=True,
        )
        (top,) = likeliest(choice)
        return top


@contextmanager
def twin(
    engine: Engine,
    name: str,
    model: Path,
    directory: Path,
    passes: Mapping[str, Any] | None,
    environ: Mapping[str, str],
) -> Iterator[Twin]:
    """Start one server with passes, or with none, and end it."""
    log, records = directory / f"{name}.log", directory / f"{name}-records"
    settings = {
        **engine.environ,
        "VLLM_CACHE_ROOT": str(directory / "cache"),  # one for both: the key tells them apart
        ENVIRONMENT: "off" if passes is None else json.dumps({"passes": passes}),
        reporting.ENVIRONMENT: str(records),
        **environ,
    }
    with http_server.started(engine.command(model), log, settings, START_SECONDS) as server:
        yield Twin(name, server, log, records, log.stat().st_size)
