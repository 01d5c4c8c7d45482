"""What of an installed or a released vLLM and vllm-ascend the passes recognise."""
