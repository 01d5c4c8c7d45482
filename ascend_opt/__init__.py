"""Pluggable optimization passes for an installed vLLM / vllm-ascend."""
