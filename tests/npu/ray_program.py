"""Generates with vLLM's Ray executor on a local Ray, and prints tokens and every record as JSON.

Usage: ``ray_program.py MODEL``.
"""

import json
import os
import sys
import time

import ray
from npu.engine_program import KEYWORDS, LENGTHS, NUM_TOKENS, prompt

from ascend_opt.reporting import read_records


def main() -> None:
    # Ray has to be told of a device that it cannot find by itself.
    ray.init(num_cpus=2, resources={"NPU": 1}, include_dashboard=False, log_to_driver=False)
    # The engine's process would start a Ray of its own otherwise.
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], **KEYWORDS, distributed_executor_backend="ray")
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    outputs = llm.generate([prompt(i) for i in range(len(LENGTHS))], greedy)
    time.sleep(2)  # records are written every second
    result = {
        "tokens": {str(i): list(o.outputs[0].token_ids) for i, o in enumerate(outputs)},
        "records": [record.as_dict() for record in read_records()],
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
