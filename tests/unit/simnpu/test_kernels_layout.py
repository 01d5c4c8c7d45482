"""Kernels that move, convert, index or sort elements."""

import pytest
import torch

from ascend_opt.simnpu.kernels import KERNELS

X = torch.arange(24.0).view(2, 3, 4)


def fresh(result):
    """Check that a result shares no memory with X, and give it back."""
    assert result.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()
    return result


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("npu_format_cast", (29,)),
        ("npu_format_cast.Tensor", (torch.zeros(1),)),
        ("_npu_format_cast", (29,)),
        ("_npu_format_cast.aclnn", (29, 0)),
    ],
)
def test_format_casts_copy(name, args):
    """A private format holds the same elements; the result is a tensor of its own."""
    strided = X.transpose(1, 2)
    assert torch.equal(fresh(KERNELS[f"npu::{name}"](strided, *args)), strided)


def test_format_casts_in_place():
    """With a source, its elements arrive; with a format, nothing moves."""
    target = torch.zeros(2, 3, 4)
    assert KERNELS["npu::npu_format_cast_"](target, X) is target
    assert torch.equal(target, X)
    assert KERNELS["npu::npu_format_cast_.acl_format"](target, 29) is target
    assert torch.equal(target, X)


def test_format_cast_to_another_dtype_is_refused():
    """Casting the dtype on the way is not implemented."""
    with pytest.raises(NotImplementedError, match="npu_format_cast got customize_dtype=1"):
        KERNELS["npu::npu_format_cast"](X, 29, customize_dtype=1)


@pytest.mark.parametrize("name", ["npu_dtype_cast", "_npu_dtype_cast"])
@pytest.mark.parametrize("number", [3, torch.int32])
def test_dtype_casts(name, number):
    """A dtype may come as PyTorch's number for it; the same dtype still gives a copy."""
    cast = KERNELS[f"npu::{name}"]

    assert torch.equal(cast(X + 0.5, number), X.int())
    assert cast(X, number).dtype == torch.int32
    assert torch.equal(fresh(cast(X, 6)), X)
    with pytest.raises(NotImplementedError, match="dtype number 290"):
        cast(X, 290)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.uint8, 0),
        (torch.int8, 1),
        (torch.int16, 2),
        (torch.int64, 4),
        (torch.float16, 5),
        (torch.float64, 7),
        (torch.bool, 11),
        (torch.bfloat16, 15),
    ],
)
def test_dtype_numbers_are_pytorchs(dtype, number):
    """The numbers agree with what PyTorch makes of a dtype for an int argument of a schema."""
    seen = []
    library = torch.library.Library("simnpu_dtype_test", "FRAGMENT")
    library.define(f"number_{number}(Tensor x, int dtype) -> ()")
    library.impl(f"number_{number}", lambda x, dtype: seen.append(dtype), "CPU")

    getattr(torch.ops.simnpu_dtype_test, f"number_{number}")(X, dtype)

    assert seen == [number]
    assert KERNELS["npu::npu_dtype_cast"](X, number).dtype == dtype


def test_dtype_cast_in_place():
    """The target keeps its dtype."""
    target = torch.zeros(2, 3, 4, dtype=torch.int64)
    assert KERNELS["npu::npu_dtype_cast_"](target, X) is target
    assert torch.equal(target, X.long())


CASES = {
    "npu_reshape": ((X.transpose(0, 1), [4, 6]), X.transpose(0, 1).reshape(4, 6)),
    "npu_transpose": ((X, [2, 0, 1]), torch.einsum("abc->cab", X)),
    "npu_slice": ((X, [0, 1, 2], [2, 2, 1]), X[:, 1:3, 2:3]),
    "npu_broadcast": ((X[:, :1], [2, 3, 4]), X[:, [0, 0, 0]]),
    "npu_stride_copy": ((X, [3, 2], [4, 12], 1), X[:, :, 1].T),
    "npu_sort_v2": ((-X, 1), -X.flip(1)),
}


@pytest.mark.parametrize("name", CASES)
def test_copies_and_their_out_variants(name):
    """The result is a contiguous copy; the .out variant writes it into the tensor given."""
    args, expected = CASES[name]
    out = torch.full(expected.shape, -1.0)

    result = fresh(KERNELS[f"npu::{name}"](*args))

    assert torch.equal(result, expected)
    assert result.is_contiguous()
    assert KERNELS[f"npu::{name}.out"](*args, out=out) is out
    assert torch.equal(out, expected)


def test_confusion_transpose_in_both_orders():
    """Permuting before reshaping is not the same as after."""
    kernel = KERNELS["npu::npu_confusion_transpose"]

    assert torch.equal(kernel(X, [1, 0, 2], [3, 8], True), X.permute(1, 0, 2).reshape(3, 8))
    assert torch.equal(kernel(X, [1, 0], [6, 4], False), X.reshape(6, 4).T)


def test_writes_in_place():
    """npu_view_copy and one_ write their argument and return it."""
    target = torch.zeros(2, 3, 4)
    assert KERNELS["npu::npu_view_copy"](target, X, False) is target
    assert torch.equal(target, X)
    assert KERNELS["npu::one_"](target) is target
    assert torch.equal(target, torch.ones(2, 3, 4))


def test_scatter_nd_update():
    """Rows of indices address the leading dimensions; the in-place form returns its argument."""
    indices = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32)
    updates = torch.tensor([[9.0] * 4, [8.0] * 4])
    expected = X.clone()
    expected[1, 2], expected[0, 0] = 9.0, 8.0

    assert torch.equal(fresh(KERNELS["npu::npu_scatter_nd_update"](X, indices, updates)), expected)
    target = X.clone()
    assert KERNELS["npu::npu_scatter_nd_update_"](target, indices, updates) is target
    assert torch.equal(target, expected)


def test_one_hot():
    """Classes outside the depth get the off value everywhere."""
    result = KERNELS["npu::npu_one_hot"](torch.tensor([[2, 0], [5, 1]]), -1, 3, 7, -1)

    assert result.tolist() == [[[-1, -1, 7], [7, -1, -1]], [[-1, -1, -1], [-1, 7, -1]]]
    assert result.dtype == torch.float32
    with pytest.raises(NotImplementedError, match="num_classes=0"):
        KERNELS["npu::npu_one_hot"](torch.tensor([1]), 0, 3)


def test_extrema_have_int32_indices():
    """Values and where they are, in the integer type of the device."""
    high, where_high = KERNELS["npu::npu_max.dim"](X, 1)
    low, where_low = KERNELS["npu::npu_min.dim"](X, 1, True)

    assert torch.equal(high, X[:, 2])
    assert torch.equal(where_high, torch.full((2, 4), 2, dtype=torch.int32))
    assert torch.equal(low, X[:, :1])
    assert torch.equal(where_low, torch.zeros(2, 1, 4, dtype=torch.int32))
    assert where_high.dtype == where_low.dtype == torch.int32
