"""A server of one user: an engine in a process of its own, which answers lines on stdin.

Usage: ``server_program.py MODEL``. Each line asks for that many tokens; the answer is ``TOKENS``
and JSON, or ``DIED`` and what the engine's end looks like from here.
"""

import json
import sys

PROMPTS = [[32 + (7 * i + k * k) % 95 for k in range(n)] for i, n in enumerate((5, 11, 23))]


def main() -> None:
    import ascend_opt

    ascend_opt.enable("counter")
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=2048, max_num_seqs=4, seed=0)
    print("READY", flush=True)
    for line in sys.stdin:
        sampling = SamplingParams(temperature=0, max_tokens=int(line), ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        try:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        except Exception as error:
            print("DIED", type(error).__name__, flush=True)
            return
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print("TOKENS", json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main()
