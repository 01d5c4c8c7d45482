"""An engine in this process, stepped by hand, that reports mlp-prefetch's counters step by step.

Run as a script with a job (JSON) and the path of the answer; see `Job` in test_mlp_prefetch.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ascend_opt

NAME = "mlp-prefetch"


def counters() -> dict[str, int]:
    """Return the pass's counters; empty while it is off."""
    return next(dict(s.counters) for s in ascend_opt.status() if s.name == NAME)


def since(before: dict[str, int]) -> dict[str, int]:
    now = counters()
    return {key: now[key] - before.get(key, 0) for key in now if now[key] != before.get(key, 0)}


def force_vllm_compile() -> None:
    """Take VLLM_COMPILE, piecewise and cached, where the CPU platform would turn it down."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        vllm_config.compilation_config.compile_sizes = []

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    # It names operators that the CPU build does not have.
    FixFunctionalizationPass.__call__ = lambda self, graph: None


def watch_graphs(found: list[int]) -> None:
    """Keep, for each graph that is compiled, how many calls of our op it has."""
    from torch._dynamo import output_graph

    call = output_graph.OutputGraph.call_user_compiler

    def call_user_compiler(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(sum("ascend_opt" in str(node.target) for node in graph.graph.nodes))
        return call(self, graph, *args, **kwargs)

    output_graph.OutputGraph.call_user_compiler = call_user_compiler


def main(job: dict[str, Any]) -> dict[str, Any]:
    graphs: list[int] = []
    watch_graphs(graphs)
    if job["parameters"] is not None:
        ascend_opt.enable(NAME, **job["parameters"])
    from vllm import LLM, SamplingParams
    from vllm.compilation.counter import compilation_counter

    if job["mode"] == "vllm-compile":
        force_vllm_compile()
    engine = LLM(
        job["model"],
        enforce_eager=job["mode"] == "eager",
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=4,
        enable_prefix_caching=False,
        seed=0,
    ).llm_engine
    start = counters()

    def generate(prompts: list[list[int]], max_tokens: int) -> list[Any]:
        """Return the tokens of each prompt, and what the counters did in each step."""
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        tokens: dict[str, list[int]] = {}
        steps = []
        while engine.has_unfinished_requests():
            before = counters()
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            steps.append(since(before))
        return [[tokens[str(i)] for i in range(len(prompts))], steps]

    answer: dict[str, Any] = {
        "start": start,
        "runs": [generate(run["prompts"], run["max_tokens"]) for run in job["runs"]],
    }
    status = next(s for s in ascend_opt.status() if s.name == NAME)
    if status.state == "active":
        ascend_opt.disable(NAME)
        answer["off"] = generate(job["runs"][0]["prompts"], job["runs"][0]["max_tokens"])
        ascend_opt.enable(NAME, **job["parameters"])
        answer["on"] = generate(job["runs"][0]["prompts"], job["runs"][0]["max_tokens"])
    answer |= {
        "state": str(status.state),
        "reason": status.reason,
        "graphs": graphs,
        "compiled": vars(compilation_counter),
    }
    return answer


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
