"""Steps an engine on the simulated device and prints what each step made the driver prefetch.

Usage: ``prefetch_program.py MODEL KEYWORDS_AS_JSON PARAMETERS_AS_JSON [LENGTH...]``; null leaves
the pass off, and the lengths are those of the prompts.
"""

import json
import sys
from typing import Any

KEYWORDS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "gpu_memory_utilization": 0.2,
    "num_gpu_blocks_override": 32,
    "enable_prefix_caching": False,
}
LENGTHS = (5, 11)
NUM_TOKENS = 10


def main() -> None:
    model, keywords, parameters = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    import ascend_opt
    from ascend_opt.simnpu import counters

    if parameters is not None:
        ascend_opt.enable("mlp-prefetch", **parameters)
    from vllm import LLM, SamplingParams

    engine = LLM(model, **{**KEYWORDS, **keywords}).llm_engine
    start = counters.snapshot()
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    lengths = [int(length) for length in sys.argv[4:]] or LENGTHS
    prompts = [[2 + (7 * i + 13 * k) % 500 for k in range(n)] for i, n in enumerate(lengths)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
    tokens: dict[str, Any] = {}
    steps = []
    while engine.has_unfinished_requests():
        before = counters.snapshot()
        counters.mark(f"step {len(steps)}")
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        done = counters.snapshot() - before
        steps.append(
            {
                "prefetches": done["cmo_async"],
                "bytes": done.bytes["cmo_async"],
                "replayed": done.replayed["cmo_async"],
                "replayed_bytes": done.replayed_bytes["cmo_async"],
                "kernels": done["kernel"] + done.replayed["kernel"],
            }
        )
    counters.mark("end")
    status = next(s for s in ascend_opt.status() if s.name == "mlp-prefetch")
    result = {
        "tokens": tokens,
        "steps": steps,
        "start": {"prefetches": start["cmo_async"], "bytes": start.bytes["cmo_async"]},
        "state": str(status.state),
        "reason": status.reason,
        "counters": status.counters,
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
