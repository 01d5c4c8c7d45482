# Arguments bear the names that the operators' schemas give them, `input` among them.
# ruff: noqa: A002
"""Matrix products."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from ascend_opt.simnpu.kernels.registry import kernel, unsupported


@kernel("npu::npu_linear")
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``(Tensor input, Tensor weight, Tensor? bias) -> Tensor``: ``input @ weight.T + bias``."""
    return functional.linear(input, weight, bias)


@kernel("npu::npu_bmmV2")
def npu_bmm_v2(input: Tensor, mat2: Tensor, output_sizes: Sequence[int]) -> Tensor:
    """``(Tensor input, Tensor mat2, int[] output_sizes) -> Tensor``: matmul, then reshape.

    An empty ``output_sizes`` keeps the product's own shape.
    """
    product = input.matmul(mat2)
    return product.reshape(tuple(output_sizes)) if output_sizes else product


@kernel("atb::_npu_matmul_add_fp32")
def npu_matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:  # noqa: N803
    """``(Tensor x, Tensor weight, Tensor(a!) C) -> ()``: ``C += x.T @ weight`` in float32.

    Args:
        x: ``[k, m]``, float16 or bfloat16.
        weight: ``[k, n]``, same dtype as ``x``.
        C: ``[m, n]``, float32; updated in place.
    """
    C.add_(x.float().t() @ weight.float())


@kernel("npu::npu_transpose_batchmatmul")
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """A batched product with its operands and result permuted; made by a compiler's fusion.

    Args:
        input: ``[batch, m, k]`` after ``perm_x1``.
        weight: ``[batch, k, n]`` after ``perm_x2``.
        bias: Broadcasts to ``[batch, m, n]``, or None.
        scale: Not implemented (quantised output).
        perm_x1: Order of the dimensions of ``input``; None to leave it.
        perm_x2: Likewise of ``weight``.
        perm_y: Likewise of the product.
        batch_split_factor: Only 1 is implemented.

    Returns:
        The permuted product, contiguous.
    """
    split = None if batch_split_factor == 1 else batch_split_factor
    unsupported("npu_transpose_batchmatmul", scale=scale, batch_split_factor=split)
    x1 = input if perm_x1 is None else input.permute(tuple(perm_x1))
    x2 = weight if perm_x2 is None else weight.permute(tuple(perm_x2))
    product = x1.bmm(x2) if bias is None else x1.bmm(x2) + bias
    return (product if perm_y is None else product.permute(tuple(perm_y))).contiguous()
