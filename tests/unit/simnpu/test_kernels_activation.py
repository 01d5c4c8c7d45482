"""Activation and matrix product kernels against formulas in float64."""

import pytest
import torch

from ascend_opt.simnpu.kernels import KERNELS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def make_tensor(*shape, dtype=torch.float32, seed=0):
    """Draw normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize(("shape", "dim"), [((5, 14), -1), ((0, 6), -1), ((2, 6, 5), 1)])
def test_swiglu_gates_the_second_half_by_the_first(dtype, shape, dim):
    """The gate is the first half along dim; SiLU of it is multiplied by the second half."""
    x = make_tensor(*shape, dtype=dtype)

    y = KERNELS["npu::npu_swiglu"](x, dim)

    half = shape[dim] // 2
    gate, up = x.double().narrow(dim, 0, half), x.double().narrow(dim, half, half)
    # SiLU is rounded to the dtype before the product, as in vLLM's own CPU and native code.
    silu = (gate / (1 + (-gate).exp())).to(dtype).double()
    torch.testing.assert_close(y, (silu * up).to(dtype))


def test_swiglu_refuses_an_odd_size():
    """There are no two halves of seven."""
    with pytest.raises(ValueError, match="size 7"):
        KERNELS["npu::npu_swiglu"](make_tensor(2, 7))


@DTYPES
def test_unary_activations(dtype):
    """SiLU, fast GELU and GELU are their formulas; the in-place SiLU writes its argument."""
    x = make_tensor(4, 9, dtype=dtype) * 3
    wide = x.double()

    silu = wide / (1 + (-wide).exp())
    torch.testing.assert_close(KERNELS["npu::npu_silu"](x), silu.to(dtype))
    fast = wide / (1 + (-1.702 * wide).exp())
    torch.testing.assert_close(KERNELS["npu::npu_fast_gelu"](x), fast.to(dtype))
    exact = wide * 0.5 * (1 + torch.erf(wide / 2**0.5))
    torch.testing.assert_close(KERNELS["npu::npu_gelu"](x), exact.to(dtype), rtol=2e-2, atol=1e-5)
    written = x.clone()
    assert KERNELS["npu::npu_silu_"](written) is written
    torch.testing.assert_close(written, silu.to(dtype))


def test_linear_with_and_without_bias():
    """npu_linear is x w^T + b."""
    x, w, b = make_tensor(3, 5), make_tensor(4, 5, seed=1), make_tensor(4, seed=2)

    torch.testing.assert_close(KERNELS["npu::npu_linear"](x, w), torch.einsum("ik,jk->ij", x, w))
    expected = torch.einsum("ik,jk->ij", x, w) + b
    torch.testing.assert_close(KERNELS["npu::npu_linear"](x, w, b), expected)


def test_matmul_add_accumulates_in_float32():
    """C grows by x^T w, whose products are not rounded to the inputs' bfloat16."""
    x, w = make_tensor(7, 3, dtype=torch.bfloat16), make_tensor(7, 4, dtype=torch.bfloat16, seed=1)
    total = make_tensor(3, 4, seed=2)
    expected = total.double() + torch.einsum("km,kn->mn", x.double(), w.double())

    KERNELS["atb::_npu_matmul_add_fp32"](x, w, total)

    torch.testing.assert_close(total, expected.float())


def test_bmm_reshapes_its_product_on_request():
    """An empty output_sizes keeps the shape of the product."""
    a, b = make_tensor(2, 3, 4), make_tensor(2, 4, 5, seed=1)
    product = torch.einsum("bik,bkj->bij", a, b)

    torch.testing.assert_close(KERNELS["npu::npu_bmmV2"](a, b, []), product)
    torch.testing.assert_close(KERNELS["npu::npu_bmmV2"](a, b, [6, 5]), product.reshape(6, 5))


def test_transpose_batchmatmul_permutes_operands_and_result():
    """The permutations say what [batch, m, k] and the result's order are."""
    x, w, bias = make_tensor(3, 2, 4), make_tensor(2, 4, 5, seed=1), make_tensor(5, seed=2)
    kernel = KERNELS["npu::npu_transpose_batchmatmul"]

    y = kernel(x, w, bias=bias, perm_x1=[1, 0, 2], perm_y=[1, 0, 2])

    torch.testing.assert_close(y, torch.einsum("mbk,bkn->mbn", x, w) + bias)
    assert y.is_contiguous()
    with pytest.raises(NotImplementedError, match=r"npu_transpose_batchmatmul.*scale"):
        kernel(x, w, scale=torch.ones(5))
