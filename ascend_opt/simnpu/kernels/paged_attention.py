"""Decode attention over the paged cache, as the ATB library offers it."""

import torch
from torch import Tensor

from ascend_opt.simnpu.kernels.attention_core import Visibility, attend
from ascend_opt.simnpu.kernels.registry import kernel
from ascend_opt.simnpu.kernels.sequences import read_pages

_OP = "_npu_paged_attention"
_WORKSPACE_BYTES = 1024


@kernel(f"atb::{_OP}")
def npu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
) -> None:
    """``(query, key_cache, value_cache, ..., block_table, context_lens, out!, *, ...) -> ()``.

    One query per sequence, which sees the whole sequence. Rows of ``out`` without a context length
    are left alone; those of a sequence of length 0 become zero.

    Args:
        query: ``[tokens, num_heads, d]`` or ``[tokens, num_heads * d]``.
        key_cache: ``[blocks, block_size, num_kv_heads, d]``.
        value_cache: ``[blocks, block_size, num_kv_heads, dv]``.
        num_kv_heads: Key heads.
        num_heads: Query heads, a multiple of ``num_kv_heads``.
        scale_value: Factor on the scores.
        block_table: ``[batch, max_blocks]``, int32.
        context_lens: ``[batch]``, int32, in host memory on the device.
        out: ``[tokens, num_heads, dv]`` or ``[tokens, num_heads * dv]``; written in place.
        workspace: Ignored.

    Raises:
        ValueError: If there are more context lengths than queries or block table rows, or the cache
            has another number of heads.
    """
    del workspace
    if key_cache.shape[2] != num_kv_heads:
        raise ValueError(
            f"{_OP}: num_kv_heads={num_kv_heads} over a cache of shape {tuple(key_cache.shape)}; "
            "expected [blocks, block_size, num_kv_heads, d]"
        )
    lengths = context_lens.tolist()
    rows = min(query.shape[0], block_table.shape[0])
    if len(lengths) > rows:
        raise ValueError(
            f"{_OP}: {len(lengths)} context lengths for {query.shape[0]} queries and "
            f"{block_table.shape[0]} block table rows; expected at most {rows}"
        )
    queries = query.reshape(query.shape[0], num_heads, -1)
    outputs = out.view(out.shape[0], num_heads, -1)
    for i, length in enumerate(lengths):
        key, value = (
            read_pages(_OP, cache, block_table[i], length) for cache in (key_cache, value_cache)
        )
        row, _ = attend(queries[i : i + 1], key, value, scale=scale_value, visibility=Visibility())
        outputs[i].copy_(row[0])


@kernel(f"atb::{_OP}_get_workspace")
def npu_paged_attention_get_workspace(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
) -> Tensor:
    """``(the operator's own arguments) -> Tensor``: ``[bytes]`` uint8, for ``workspace``."""
    del key_cache, value_cache, num_kv_heads, num_heads, scale_value
    del block_table, context_lens, out
    return query.new_zeros(_WORKSPACE_BYTES, dtype=torch.uint8)
