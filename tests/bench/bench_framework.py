"""What the framework itself costs, beside its baselines: medians over fresh processes.

Run by `tox run -e bench-framework`, or `python tests/bench/bench_framework.py [ROUNDS]`. The
figures are of this machine at this moment; each line's baseline was taken in the same run, in turn
with it.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import timeit
from collections import Counter

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 15

_TIMED = """
import time
{before}
begun = time.perf_counter()
{timed}
print((time.perf_counter() - begun) * 1e3)
"""
_ENABLE = "ascend_opt.enable('mlp-prefetch', backend='record')"
_FIRST = f"import ascend_opt; {_ENABLE}"
# What a vLLM process has imported anyway, and ours: pydantic's parts, wrapt, pluggy, the passes.
_LOADED = (
    "import ascend_opt; from ascend_opt import control, registry; registry.discover(); "
    "from pydantic import TypeAdapter; import dataclasses; "
    "TypeAdapter(dataclasses.make_dataclass('Any', [('x', int)]))"
)
_CONFIG = '{"passes": {"mlp-prefetch": {"backend": "record"}}}'
# What any vLLM process has imported by the time that it loads its plugins.
_VLLM = "import vllm.plugins, vllm.engine.arg_utils"


def milliseconds(before: str, timed: str, **environment: str) -> list[float]:
    """Return how long `timed` took in fresh processes after `before`."""
    code = _TIMED.format(before=before, timed=timed)
    clean = {key: value for key, value in os.environ.items() if key != "VLLM_ASCEND_OPT"}
    return [
        float(
            subprocess.run(
                [sys.executable, "-c", code],
                env={**clean, **environment},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()[-1]
        )
        for _ in range(ROUNDS)
    ]


def show(what: str, values: list[float], aim: str) -> None:
    quarters = statistics.quantiles(values, n=4)
    spread = f"{quarters[0]:.2f}-{quarters[2]:.2f}"
    print(f"{what:<64} {statistics.median(values):9.3f} {spread:>16}   {aim}")


def main() -> None:
    print(f"{'median of ' + str(ROUNDS) + ' processes':<64} {'ms':>9} {'quartiles':>16}   aim")
    show("import of json (baseline)", milliseconds("", "import json"), "")
    show("import ascend_opt", milliseconds("", "import ascend_opt"), "< 30")
    show("enable(), first call, all its imports included", milliseconds("", _FIRST), "")
    show("enable(), first call, in a process that has them", milliseconds(_LOADED, _ENABLE), "< 20")
    again = f"{_LOADED}; {_ENABLE}"
    show("enable() again", milliseconds(again, _ENABLE), "< 20")
    if importlib.util.find_spec("vllm") is not None:
        plugin = "from ascend_opt.vllm_plugin import register; register()"
        show("vLLM plugin, nothing asked for", milliseconds(_VLLM, plugin), "< 150")
        asked = milliseconds(_VLLM, plugin, VLLM_ASCEND_OPT=_CONFIG)
        show("vLLM plugin, mlp-prefetch asked for", asked, "< 150")
        show("import of vLLM's arguments (baseline)", milliseconds("", _VLLM), "")
    counters: Counter[str] = Counter()
    calls = 1_000_000

    def count() -> None:
        counters["steps"] += 1

    seconds = timeit.repeat(count, number=calls, repeat=ROUNDS)
    show("counting one step", [s / calls * 1e3 for s in seconds], "< 0.001")


if __name__ == "__main__":
    main()
