"""Stands in for CANN's Python module, of which vllm-ascend uses one copy function."""

from . import rt

__all__ = ["rt"]
