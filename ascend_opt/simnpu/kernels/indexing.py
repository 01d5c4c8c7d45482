# Arguments bear the names that the operators' schemas give them, `input` among them.
# ruff: noqa: A002
"""Scattering by index, one-hot, sorting and extrema."""

import torch
from torch import Tensor

from ascend_opt.simnpu.kernels.registry import kernel


@kernel("npu::npu_scatter_nd_update_")
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """``(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)``.

    Args:
        input: ``[d1, ..., dn]``; written in place.
        indices: ``[..., r]`` with ``r <= n``: each row indexes the first r dimensions.
        updates: ``[..., d(r+1), ..., dn]``: what to write there. The last one wins where rows of
            ``indices`` are equal; the device promises nothing for that.

    Returns:
        ``input``.
    """
    input[tuple(indices.long().unbind(-1))] = updates
    return input


@kernel("npu::npu_scatter_nd_update")
def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """``(Tensor input, Tensor indices, Tensor updates) -> Tensor``: the same, on a copy."""
    return npu_scatter_nd_update_(input.clone(), indices, updates)


@kernel("npu::npu_one_hot")
def npu_one_hot(
    input: Tensor,
    num_classes: int = -1,
    depth: int = 1,
    on_value: float = 1,
    off_value: float = 0,
) -> Tensor:
    """``(Tensor input, int num_classes, int depth, Scalar on, Scalar off) -> Tensor``.

    Args:
        input: Class of each element, integers; classes outside [0, depth) get no on_value.
        num_classes: The axis of the output that holds the classes; -1 for a new last one. No other
            axis is implemented.
        depth: Number of classes.
        on_value: Value at the class.
        off_value: Value everywhere else.

    Returns:
        ``[*input.shape, depth]``, float32.

    Raises:
        NotImplementedError: For another axis.
    """
    if num_classes != -1:
        raise NotImplementedError(
            f"simnpu: npu_one_hot got num_classes={num_classes} (the axis); expected -1"
        )
    hit = input.long().unsqueeze(-1) == torch.arange(depth)
    return torch.where(hit, float(on_value), float(off_value))


@kernel("npu::npu_sort_v2")
def npu_sort_v2(input: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    """``(Tensor input, int dim, bool descending) -> Tensor``: the sorted values alone."""
    return input.sort(dim=dim, descending=descending).values


@kernel("npu::npu_sort_v2.out")
def npu_sort_v2_out(
    input: Tensor,
    dim: int = -1,
    descending: bool = False,
    *,
    out: Tensor,
) -> Tensor:
    """``(..., *, Tensor(a!) out) -> Tensor(a!)``: as npu_sort_v2, into ``out``."""
    return out.copy_(npu_sort_v2(input, dim, descending))


@kernel("npu::npu_max.dim")
def npu_max(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``(Tensor input, int dim, bool keepdim) -> (values, indices)``; indices are int32."""
    values, indices = input.max(dim, keepdim)
    return values, indices.int()


@kernel("npu::npu_min.dim")
def npu_min(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``(Tensor input, int dim, bool keepdim) -> (values, indices)``; indices are int32."""
    values, indices = input.min(dim, keepdim)
    return values, indices.int()
