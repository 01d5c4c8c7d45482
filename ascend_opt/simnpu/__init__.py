"""A simulated Ascend driver: the real torch_npu, vllm-ascend and vLLM on a plain CPU.

Run a program on it with ``python -m ascend_opt.simnpu run -- python script.py``, and read from
inside the program what it made the driver do with :mod:`ascend_opt.simnpu.counters`. The rest is in
docs/simnpu.md.
"""
