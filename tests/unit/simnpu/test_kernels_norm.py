"""RMS normalisation kernels against the textbook formula in float64."""

import pytest
import torch

from ascend_opt.simnpu.kernels import KERNELS, META

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def rms_norm(x, gamma, epsilon):
    """The formula, in float64, over the last dimension."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma.double()


def make_tensor(*shape, dtype, seed=0):
    """Draw normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 33), (0, 16), (1, 1), (2, 3, 7)])
def test_rms_norm_is_the_formula(dtype, shape):
    """The norm is x over its root mean square, times gamma; also for odd and empty shapes."""
    x, gamma = make_tensor(*shape, dtype=dtype), make_tensor(shape[-1], dtype=dtype, seed=1)

    y, rstd = KERNELS["npu::npu_rms_norm"](x, gamma, 1e-3)

    torch.testing.assert_close(y, rms_norm(x, gamma, 1e-3).to(dtype))
    assert rstd.dtype == torch.float32
    assert rstd.shape == (*shape[:-1], 1)
    expected_rstd = (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    torch.testing.assert_close(rstd, expected_rstd.float())


def test_rms_norm_over_two_dimensions():
    """A two-dimensional gamma normalises the last two dimensions together."""
    x, gamma = (
        make_tensor(4, 3, 5, dtype=torch.float32),
        make_tensor(3, 5, dtype=torch.float32, seed=1),
    )

    y, rstd = KERNELS["npu::npu_rms_norm"](x, gamma, 1e-6)

    flat = rms_norm(x.flatten(1), gamma.flatten(), 1e-6).view_as(x).float()
    torch.testing.assert_close(y, flat)
    assert rstd.shape == (4, 1, 1)


@DTYPES
def test_add_rms_norm_returns_norm_and_sum(dtype):
    """The sum is rounded to the dtype first: the norm is of what the caller gets as residual."""
    x1, x2, gamma = (make_tensor(6, 31, dtype=dtype, seed=s) for s in range(3))
    gamma = gamma[0]

    y, _, x = KERNELS["npu::npu_add_rms_norm"](x1, x2, gamma, 1e-6)

    assert torch.equal(x, x1 + x2)
    torch.testing.assert_close(y, rms_norm(x1 + x2, gamma, 1e-6).to(dtype))


@DTYPES
def test_add_rms_norm_bias_adds_beta_to_the_norm_only(dtype):
    """Beta shifts y, and neither the residual nor its statistics."""
    x1, x2, beta = (make_tensor(6, 31, dtype=dtype, seed=s) for s in range(3))
    beta, gamma = beta[0], make_tensor(31, dtype=dtype, seed=3)
    kernel = KERNELS["_C_ascend::npu_add_rms_norm_bias"]

    plain, shifted = kernel(x1, x2, gamma), kernel(x1, x2, gamma, beta)

    torch.testing.assert_close(plain[0], rms_norm(x1 + x2, gamma, 1e-6).to(dtype))
    torch.testing.assert_close(shifted[0], plain[0] + beta)
    assert torch.equal(shifted[1], plain[1])
    assert torch.equal(shifted[2], plain[2])


def test_inputs_are_left_alone():
    """Out-of-place kernels change none of their inputs."""
    x1, x2 = make_tensor(3, 8, dtype=torch.float32), make_tensor(3, 8, dtype=torch.float32, seed=1)
    before = x1.clone(), x2.clone()

    KERNELS["_C_ascend::npu_add_rms_norm_bias"](x1, x2, torch.full((8,), 2.0))

    assert torch.equal(x1, before[0])
    assert torch.equal(x2, before[1])


def test_in_place_variant_writes_norm_and_sum():
    """npu_add_rms_norm_v2 leaves y in x1 and the sum in x2; its functional form returns them."""
    x1, x2 = make_tensor(3, 8, dtype=torch.float32), make_tensor(3, 8, dtype=torch.float32, seed=1)
    gamma = make_tensor(8, dtype=torch.float32, seed=2)
    functional = KERNELS["npu::npu_add_rms_norm_v2_functional"](x1, x2, gamma)
    total = x1 + x2

    rstd = KERNELS["npu::npu_add_rms_norm_v2"](x1, x2, gamma)

    torch.testing.assert_close(x1, rms_norm(total, gamma, 1e-6).float())
    assert torch.equal(x2, total)
    for returned, expected in zip(functional, (rstd, x1, x2), strict=True):
        assert torch.equal(returned, expected)


def test_cast_variant_adds_a_float32_copy():
    """npu_add_rms_norm_cast returns y in float32 before y itself."""
    x1, x2, gamma = (make_tensor(3, 8, dtype=torch.bfloat16, seed=s) for s in range(3))

    wide, y, _, x = KERNELS["npu::npu_add_rms_norm_cast"](x1, x2, gamma[0])

    assert wide.dtype == torch.float32
    assert torch.equal(wide, y.float())
    assert torch.equal(x, x1 + x2)
    torch.testing.assert_close(y, rms_norm(x1 + x2, gamma[0], 1e-6).bfloat16())


@pytest.mark.parametrize("name", ["npu::npu_gemma_rms_norm", "_C_ascend::npu_gemma_rms_norm"])
def test_gemma_norm_scales_by_one_plus_gamma(name):
    """Gemma stores gamma less one."""
    x, gamma = make_tensor(4, 9, dtype=torch.float32), make_tensor(9, dtype=torch.float32, seed=1)

    y, _ = KERNELS[name](x, gamma, 1e-6)

    torch.testing.assert_close(y, rms_norm(x, 1 + gamma, 1e-6).float())


@DTYPES
@pytest.mark.parametrize("name", ["npu_add_rms_norm_bias", "npu_gemma_rms_norm"])
def test_shape_functions_agree_with_kernels(dtype, name):
    """What a compiler is told about outputs is what the kernel gives: shapes and dtypes."""
    inputs = [make_tensor(2, 5, 7, dtype=dtype, seed=s) for s in range(2 if "add" in name else 1)]
    inputs.append(make_tensor(7, dtype=dtype, seed=2))

    real = KERNELS[f"_C_ascend::{name}"](*inputs)
    shapes = META[f"_C_ascend::{name}"](*(x.to("meta") for x in inputs))

    assert [(x.shape, x.dtype) for x in real] == [(x.shape, x.dtype) for x in shapes]
    assert all(x.is_meta for x in shapes)
