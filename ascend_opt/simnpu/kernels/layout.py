# Arguments bear the names that the operators' schemas give them, `input` among them.
# ruff: noqa: A002
"""Operators that move or convert elements and compute nothing: formats, dtypes, views, copies.

The device keeps some tensors in private formats (a *fractal* order of the same elements). The
simulated device has one format, plain row-major, so a cast between formats is a copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_opt.simnpu.kernels.registry import kernel, unsupported

# PyTorch's ScalarType numbers, in which schemas say "int dtype"; those that torch_npu adds for its
# 8-bit and 4-bit floats start at 256.
_SCALAR_TYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}


@kernel("npu::npu_format_cast")
def npu_format_cast(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """``(Tensor input, int acl_format, *, ...) -> Tensor``: a copy; the format is not kept."""
    del acl_format
    unsupported("npu_format_cast", customize_dtype=customize_dtype, input_dtype=input_dtype)
    return input.clone()


@kernel("npu::npu_format_cast.Tensor")
def npu_format_cast_like(
    input: Tensor,
    dst: Tensor,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """``(Tensor input, Tensor dst, *, ...) -> Tensor``: a copy of ``input``."""
    del dst
    unsupported("npu_format_cast", customize_dtype=customize_dtype, input_dtype=input_dtype)
    return input.clone()


@kernel("npu::npu_format_cast_")
def npu_format_cast_(
    input: Tensor,
    src: Tensor,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """``(Tensor(a!) input, Tensor src, *, ...) -> Tensor(a!)``: ``input`` becomes ``src``."""
    unsupported("npu_format_cast_", customize_dtype=customize_dtype, input_dtype=input_dtype)
    return input.copy_(src)


@kernel("npu::npu_format_cast_.acl_format")
def npu_format_cast_in_place(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """``(Tensor(a!) input, int acl_format, *, ...) -> Tensor(a!)``: ``input``, unchanged."""
    del acl_format
    unsupported("npu_format_cast_", customize_dtype=customize_dtype, input_dtype=input_dtype)
    return input


@kernel("npu::_npu_format_cast")
def npu_format_cast_plain(input: Tensor, acl_format: int) -> Tensor:
    """``(Tensor input, int acl_format) -> Tensor``: a copy."""
    del acl_format
    return input.clone()


@kernel("npu::_npu_format_cast.aclnn")
def npu_format_cast_aclnn(
    input: Tensor,
    acl_format: int,
    customize_dtype: int,
) -> Tensor:
    """``(Tensor input, int acl_format, int customize_dtype) -> Tensor``: a copy.

    Callers state the tensor's own dtype where none is wanted, so it cannot be refused outright.
    """
    del acl_format, customize_dtype
    return input.clone()


def _dtype(op: str, dtype: int | torch.dtype) -> torch.dtype:
    """Read a schema's ``int dtype`` or ``ScalarType dtype``."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _SCALAR_TYPES:
        raise NotImplementedError(
            f"simnpu: {op} to dtype number {dtype}; expected one of {sorted(_SCALAR_TYPES)}"
        )
    return _SCALAR_TYPES[dtype]


@kernel("npu::npu_dtype_cast")
def npu_dtype_cast(
    input: Tensor,
    dtype: int | torch.dtype,
    input_dtype: int | None = None,
) -> Tensor:
    """``(Tensor input, int dtype, int? input_dtype) -> Tensor``: a copy in another dtype."""
    unsupported("npu_dtype_cast", input_dtype=input_dtype)
    return input.to(_dtype("npu_dtype_cast", dtype), copy=True)


@kernel("npu::_npu_dtype_cast")
def npu_dtype_cast_scalar_type(input: Tensor, dtype: int | torch.dtype) -> Tensor:
    """``(Tensor input, ScalarType dtype) -> Tensor``: a copy in another dtype."""
    return input.to(_dtype("_npu_dtype_cast", dtype), copy=True)


@kernel("npu::npu_dtype_cast_")
def npu_dtype_cast_(input: Tensor, src: Tensor) -> Tensor:
    """``(Tensor(a!) input, Tensor src) -> Tensor(a!)``: ``src`` in the dtype of ``input``."""
    return input.copy_(src)


@kernel("npu::npu_reshape")
def npu_reshape(input: Tensor, shape: Sequence[int], can_refresh: bool = False) -> Tensor:
    """``(Tensor input, int[] shape, bool can_refresh) -> Tensor``: a copy in another shape."""
    del can_refresh
    return input.clone(memory_format=torch.contiguous_format).view(tuple(shape))


@kernel("npu::npu_reshape.out")
def npu_reshape_out(
    input: Tensor,
    shape: Sequence[int],
    can_refresh: bool = False,
    *,
    out: Tensor,
) -> Tensor:
    """``(..., *, Tensor(a!) out) -> Tensor(a!)``: as npu_reshape, into ``out``."""
    return out.copy_(npu_reshape(input, shape, can_refresh))


@kernel("npu::npu_transpose")
def npu_transpose(
    input: Tensor,
    perm: Sequence[int],
    require_contiguous: bool = True,
) -> Tensor:
    """``(Tensor input, int[] perm, bool) -> Tensor``: the dimensions in another order, copied."""
    del require_contiguous
    return input.permute(tuple(perm)).clone(memory_format=torch.contiguous_format)


@kernel("npu::npu_transpose.out")
def npu_transpose_out(
    input: Tensor,
    perm: Sequence[int],
    require_contiguous: bool = True,
    *,
    out: Tensor,
) -> Tensor:
    """``(..., *, Tensor(a!) out) -> Tensor(a!)``: as npu_transpose, into ``out``."""
    del require_contiguous
    return out.copy_(input.permute(tuple(perm)))


@kernel("npu::npu_confusion_transpose")
def npu_confusion_transpose(
    input: Tensor,
    perm: Sequence[int],
    shape: Sequence[int],
    transpose_first: bool,
) -> Tensor:
    """``(Tensor input, int[] perm, int[] shape, bool) -> Tensor``: permute and reshape, copied."""
    if transpose_first:
        return npu_reshape(input.permute(tuple(perm)), shape)
    return npu_transpose(input.reshape(tuple(shape)), perm)


@kernel("npu::npu_slice")
def npu_slice(input: Tensor, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
    """``(Tensor input, int[] offsets, int[] size) -> Tensor``: one box of ``input``, copied."""
    box = input
    for dim, (offset, length) in enumerate(zip(offsets, size, strict=True)):
        box = box.narrow(dim, offset, length)
    return box.clone(memory_format=torch.contiguous_format)


@kernel("npu::npu_slice.out")
def npu_slice_out(
    input: Tensor,
    offsets: Sequence[int],
    size: Sequence[int],
    *,
    out: Tensor,
) -> Tensor:
    """``(..., *, Tensor(a!) out) -> Tensor(a!)``: as npu_slice, into ``out``."""
    return out.copy_(npu_slice(input, offsets, size))


@kernel("npu::npu_broadcast")
def npu_broadcast(input: Tensor, size: Sequence[int]) -> Tensor:
    """``(Tensor input, int[] size) -> Tensor``: expanded, copied."""
    return input.expand(tuple(size)).clone(memory_format=torch.contiguous_format)


@kernel("npu::npu_broadcast.out")
def npu_broadcast_out(input: Tensor, size: Sequence[int], *, out: Tensor) -> Tensor:
    """``(..., *, Tensor(a!) out) -> Tensor(a!)``: as npu_broadcast, into ``out``."""
    return out.copy_(input.expand(tuple(size)))


@kernel("npu::npu_stride_copy")
def npu_stride_copy(
    input: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    storage_offset: float,
) -> Tensor:
    """``(Tensor input, int[] shape, int[] stride, Scalar offset) -> Tensor``: a view, copied."""
    view = input.as_strided(tuple(shape), tuple(stride), int(storage_offset))
    return view.clone(memory_format=torch.contiguous_format)


@kernel("npu::npu_stride_copy.out")
def npu_stride_copy_out(
    input: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    storage_offset: float,
    *,
    out: Tensor,
) -> Tensor:
    """``(..., *, Tensor(a!) out) -> Tensor(a!)``: as npu_stride_copy, into ``out``."""
    return out.copy_(input.as_strided(tuple(shape), tuple(stride), int(storage_offset)))


@kernel("npu::npu_view_copy")
def npu_view_copy(input: Tensor, other: Tensor, non_blocking: bool) -> Tensor:
    """``(Tensor(a!) input, Tensor other, bool non_blocking) -> Tensor(a!)``: a copy in place."""
    del non_blocking
    return input.copy_(other)


@kernel("npu::one_")
def one_(input: Tensor) -> Tensor:
    """``(Tensor(a!) input) -> Tensor(a!)``: filled with ones."""
    return input.fill_(1)
