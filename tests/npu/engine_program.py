"""Drives one engine through a workload and prints tokens and counters as JSON.

Usage: ``engine_program.py MODEL [KEYWORDS_AS_JSON]``. It runs under stock vLLM as well, where there
are no counters. The engine is stepped in this process unless VLLM_ENABLE_V1_MULTIPROCESSING=1.
"""

import json
import os
import sys

NUM_TOKENS = 32
# Characters of the prompts; the longest ones need several chunks of max_num_batched_tokens=128, and
# those just under 128 need another cache block while they decode.
LENGTHS = (3, 17, 120, 200, 1, 125, 300, 64)
# The step at which each prompt arrives: the batch grows, and shrinks as requests finish.
ARRIVALS = (0, 0, 0, 2, 5, 5, 9, 20)
# Few cache blocks (of 128 tokens): not all requests fit at once, so some are preempted.
KEYWORDS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "gpu_memory_utilization": 0.2,
    "enable_prefix_caching": False,
}


def prompt(index: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [2 + (7 * index + 13 * i) % 500 for i in range(LENGTHS[index])]}


def main() -> None:
    from vllm import LLM, SamplingParams

    model, keywords = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    llm = LLM(model, **{**KEYWORDS, **keywords})
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1":
        outputs = llm.generate([prompt(i) for i in range(len(LENGTHS))], greedy)
        tokens = {str(i): list(o.outputs[0].token_ids) for i, o in enumerate(outputs)}
        print("RESULT " + json.dumps({"tokens": tokens}), flush=True)
        return
    counters = None
    if os.environ.get("SIMNPU") == "1":
        from ascend_opt.simnpu import counters

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    tokens: dict[str, list[int]] = {}
    placeholders = counters.placeholders() if counters else {}
    steps, preempted, step = [], set(), 0
    while step <= max(ARRIVALS) or engine.has_unfinished_requests():
        for index, arrival in enumerate(ARRIVALS):
            if arrival == step:
                engine.add_request(str(index), prompt(index), greedy)
        before = counters.snapshot() if counters else None
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        preempted |= {r for r, request in scheduler.requests.items() if request.num_preemptions}
        if counters:
            done = counters.snapshot() - before
            steps.append({"calls": done.nonzero(), "replayed": done.replayed["kernel"]})
        step += 1
    result = {
        "tokens": tokens,
        "steps": steps,
        "preempted": sorted(preempted),
        "placeholders_before": placeholders,
        "placeholders_after": counters.placeholders() if counters else {},
    }
    if counters:
        sampling = SamplingParams(
            max_tokens=16, temperature=0.8, top_k=20, top_p=0.9, seed=7, ignore_eos=True
        )
        sampled = [llm.generate([prompt(1)], sampling)[0].outputs[0].token_ids for _ in range(2)]
        result["sampled"] = [list(s) for s in sampled]
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
