# Arguments bear the names that the operators' schemas give them, `input` among them.
# ruff: noqa: A002
"""RMS normalisation, alone and fused with the residual addition before it."""

import torch
from torch import Tensor

from ascend_opt.simnpu.kernels.registry import kernel, meta


def rms_normalise(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Scale ``x`` to unit root mean square over the dimensions of ``gamma``, then by ``gamma``.

    The mean is taken in float32. The normalised value is rounded to the dtype of ``x`` before it is
    multiplied by ``gamma``, which is where vLLM's own reference rounds too.

    Args:
        x: ``[..., *gamma.shape]``.
        gamma: The weight.
        epsilon: Added to the mean square.

    Returns:
        ``(y, rstd)``: ``y`` like ``x``; ``rstd`` in float32, shaped like ``x`` with the normalised
        dimensions set to 1.
    """
    dims = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + epsilon)
    return ((wide * rstd).to(x.dtype) * gamma).to(x.dtype), rstd


@kernel("npu::npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``(Tensor input, Tensor gamma, float epsilon) -> (y, rstd)``; see :func:`rms_normalise`."""
    return rms_normalise(input, gamma, epsilon)


@kernel("npu::npu_gemma_rms_norm")
def npu_gemma_rms_norm(
    input: Tensor,
    gamma: Tensor,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """``(Tensor input, Tensor gamma, float epsilon) -> (y, rstd)``, scaled by ``1 + gamma``."""
    return rms_normalise(input, 1.0 + gamma, epsilon)


@kernel("_C_ascend::npu_gemma_rms_norm")
def c_ascend_gemma_rms_norm(
    x: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``(Tensor x, Tensor gamma, float epsilon) -> (y, rstd)``, scaled by ``1 + gamma``."""
    return rms_normalise(x, 1.0 + gamma, epsilon)


@kernel("npu::npu_add_rms_norm")
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x1, x2, gamma, epsilon) -> (y, rstd, x)``: ``x = x1 + x2``, ``y`` its RMS norm."""
    x = x1 + x2
    y, rstd = rms_normalise(x, gamma, epsilon)
    return y, rstd, x


@kernel("npu::npu_add_rms_norm_cast")
def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(x1, x2, gamma, epsilon) -> (y in float32, y, rstd, x)``; made by a compiler's fusion."""
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return y.float(), y, rstd, x


@kernel("npu::npu_add_rms_norm_v2")
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """``(x1!, x2!, gamma, epsilon) -> rstd``: ``x1`` becomes ``y``, and ``x2`` the sum."""
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(x)
    return rstd


@kernel("npu::npu_add_rms_norm_v2_functional")
def npu_add_rms_norm_v2_functional(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x1, x2, gamma, epsilon) -> (rstd, y, x)``: :func:`npu_add_rms_norm_v2`, not in place."""
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, y, x


@kernel("_C_ascend::npu_add_rms_norm_bias")
def npu_add_rms_norm_bias(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x1, x2, gamma, beta?, epsilon) -> (y, rstd, x)``: as npu_add_rms_norm, plus ``beta``."""
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    if beta is not None:
        y = (y + beta).to(x.dtype)
    return y, rstd, x


@meta("_C_ascend::npu_add_rms_norm_bias")
def npu_add_rms_norm_bias_shape(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of ``(y, rstd, x)``: ``y`` and ``x`` like ``x1``, ``rstd`` as in the kernel."""
    del x2, beta, epsilon
    return torch.empty_like(x1), _rstd_shape(x1, gamma), torch.empty_like(x1)


@meta("_C_ascend::npu_gemma_rms_norm")
def c_ascend_gemma_rms_norm_shape(
    x: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Shapes of ``(y, rstd)``."""
    del epsilon
    return torch.empty_like(x), _rstd_shape(x, gamma)


def _rstd_shape(x: Tensor, gamma: Tensor) -> Tensor:
    # Built from slices of x.shape, so that symbolic sizes stay symbolic.
    shape = (*x.shape[: x.dim() - gamma.dim()], *([1] * gamma.dim()))
    return x.new_empty(shape, dtype=torch.float32)
