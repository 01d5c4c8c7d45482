"""Filters applied to logits before a token is drawn.

Temperature, the random numbers and the draw itself are plain aten operators (Model Runner V1) or
Triton kernels (V2), so they need no kernel here.
"""

import math

import torch
from torch import Tensor

from ascend_opt.simnpu.kernels.registry import kernel


@kernel("npu::npu_top_k_top_p")
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """``(Tensor logits, Tensor? p, Tensor? k) -> Tensor``: logits, -inf where filtered out.

    Top-k keeps the values not below the k-th largest, ties included. Top-p then sorts what is left
    in ascending order (stable) and drops the head whose summed probability does not exceed
    ``1 - p``; the largest logit always stays.

    Args:
        logits: ``[batch, vocabulary]``; float32, bfloat16 or float16.
        p: ``[batch]``, in [0, 1]; None for no top-p.
        k: ``[batch]``, integers in [1, vocabulary]; None for no top-k.

    Returns:
        The filtered logits, in the shape and dtype of ``logits``.

    Raises:
        ValueError: If neither filter is given, or ``k`` is out of range.
    """
    if p is None and k is None:
        raise ValueError("npu_top_k_top_p: p and k are both None; expected at least one of them")
    vocabulary = logits.shape[-1]
    values, order = logits.float().sort(dim=-1, stable=True)
    if k is not None and k.numel():
        count = k.long()
        if int(count.min()) < 1 or int(count.max()) > vocabulary:
            raise ValueError(
                f"npu_top_k_top_p: k lies in [{int(count.min())}, {int(count.max())}]; "
                f"expected 1 to {vocabulary}, the size of the vocabulary"
            )
        threshold = values.gather(-1, (vocabulary - count).unsqueeze(-1))
        values = values.masked_fill(values < threshold, -math.inf)
    if p is not None:
        dropped = values.softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(-1)
        dropped[..., -1] = False
        values = values.masked_fill(dropped, -math.inf)
    return torch.empty_like(values).scatter_(-1, order, values).to(logits.dtype)
