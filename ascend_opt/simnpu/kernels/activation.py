# Arguments bear the names that the operators' schemas give them, `input` among them.
# ruff: noqa: A002
"""Activation functions of the MLP."""

import torch
from torch import Tensor
from torch.nn import functional

from ascend_opt.simnpu.kernels.registry import kernel


@kernel("npu::npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``(Tensor input, int dim) -> Tensor``: split ``dim`` in halves a and b, give silu(a) * b.

    Args:
        input: Any shape with an even size along ``dim``; float32, bfloat16 or float16.
        dim: The dimension that holds gate and up side by side.

    Returns:
        The product, in the dtype of ``input``, half as large along ``dim``.

    Raises:
        ValueError: If ``dim`` has an odd size.
    """
    if input.shape[dim] % 2:
        raise ValueError(
            f"npu_swiglu: dimension {dim} has size {input.shape[dim]}; expected an even size, "
            "gate and up side by side"
        )
    gate, up = input.chunk(2, dim)
    return functional.silu(gate) * up


@kernel("npu::npu_silu")
def npu_silu(input: Tensor) -> Tensor:
    """``(Tensor input) -> Tensor``: ``x * sigmoid(x)``."""
    return functional.silu(input)


@kernel("npu::npu_silu_")
def npu_silu_(input: Tensor) -> Tensor:
    """``(Tensor(a!) input) -> Tensor(a!)``: ``x * sigmoid(x)`` in place."""
    return functional.silu(input, inplace=True)


@kernel("npu::npu_fast_gelu", "npu::fast_gelu")
def npu_fast_gelu(input: Tensor) -> Tensor:
    """``(Tensor input) -> Tensor``: ``x * sigmoid(1.702 x)``, the form of the A2 and A3 series."""
    return (input.float() * torch.sigmoid(1.702 * input.float())).to(input.dtype)


@kernel("npu::npu_gelu")
def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """``(Tensor input, *, str approximate) -> Tensor``: GELU; ``none`` (erf) or ``tanh``."""
    return functional.gelu(input, approximate=approximate)
