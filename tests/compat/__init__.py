"""The passes against the source of real vllm-ascend releases, without a device."""
