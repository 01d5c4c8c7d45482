"""Fused infer attention score (FIA), versions 1 and 2: prefill, chunked prefill and decode.

Both compute the same attention and differ in the names of their arguments. Each has three more
operators around it: ``.out`` for a graph whose arguments are updated between replays, a query for
the workspace it needs, and one for the shapes of its output.

Supported: layouts TND, BSND, BNSD and BSH; paged and dense keys; sparse modes 0 (everything
visible), 2 and 3 (causal, aligned left and right) and 4 (sliding window); grouped heads; a
learnable sink; the logarithm of the softmax sum. Not supported: quantised inputs and outputs, an
explicit mask matrix (modes 0 and 1), position shift, padding on the left, shared prefixes, rope
passed apart (MLA).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_opt.simnpu.kernels.attention_core import Visibility, attend
from ascend_opt.simnpu.kernels.registry import kernel, unsupported
from ascend_opt.simnpu.kernels.sequences import paged_sequences, split_sequences

_V1 = "npu_fused_infer_attention_score"
_NO_LIMIT = 2**31 - 1
_WORKSPACE_BYTES = 1024  # nothing is kept in it, but callers allocate, cache and compare it


def visibility_of(
    op: str, sparse_mode: int, atten_mask: Tensor | None, pre_tokens: int, next_tokens: int
) -> Visibility:
    """Translate a sparse mode into what a query may see.

    In modes 2 to 4 the device wants one fixed 2048 x 2048 triangle as ``atten_mask`` whatever the
    lengths are: its content carries no information, but leaving it out is an error there and here.

    Args:
        op: The operator's name, for messages.
        sparse_mode: 0, 2, 3 or 4.
        atten_mask: The mask argument.
        pre_tokens: Mode 4 only: keys visible before a query's position.
        next_tokens: Mode 4 only: keys visible after it.

    Raises:
        ValueError: If modes 2 to 4 come without a mask.
        NotImplementedError: For an explicit mask matrix, and for any other mode.
    """
    if sparse_mode == 0:
        unsupported(f"{op} (sparse_mode=0)", atten_mask=atten_mask)
        return Visibility()
    if sparse_mode not in (2, 3, 4):
        unsupported(op, sparse_mode=sparse_mode)
    if atten_mask is None:
        raise ValueError(
            f"{op}: sparse_mode={sparse_mode} without atten_mask; expected the 2048 x 2048 triangle"
        )
    if sparse_mode == 4:
        return Visibility(before=pre_tokens, after=next_tokens)
    return Visibility(after=0, right_aligned=sparse_mode == 3)


def fused_attention(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str,
    heads: int,
    kv_heads: int,
    scale: float,
    visibility: Visibility,
    query_lengths: Sequence[int] | None,
    key_lengths: Sequence[int] | None,
    block_table: Tensor | None,
    block_size: int,
    sink: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attention over a batch of sequences, in any of the layouts.

    Args:
        op: The operator's name, for messages.
        query: In ``layout``: ``[tokens, heads, d]`` for TND.
        key: In ``layout``, or a paged cache if there is a block table.
        value: Likewise, with the same head size.
        layout: TND, BSND, BNSD or BSH.
        heads: Query heads.
        kv_heads: Key heads; 0 for as many as query heads.
        scale: Factor on the scores.
        visibility: Which keys a query sees.
        query_lengths: TND: running totals. Otherwise the length of each sequence, or None for all.
        key_lengths: As query_lengths; with a block table always plain lengths.
        block_table: ``[batch, max_blocks]`` int32, or None for dense keys.
        block_size: Tokens in a block; 0 to take the cache's.
        sink: ``[heads]``, or None.
        with_lse: Whether to return the logarithm of the softmax sum.

    Returns:
        ``(output, lse)``. ``output`` like ``query``, zero for tokens of no sequence. ``lse`` in
        float32: ``[tokens, heads, 1]`` for TND, ``[batch, heads, sequence, 1]`` otherwise, or one
        zero if it was not asked for.
    """
    kv_heads = kv_heads or heads
    queries = split_sequences(op, query, layout, heads, query_lengths)
    if block_table is None:
        keys, values = (split_sequences(op, x, layout, kv_heads, key_lengths) for x in (key, value))
    else:
        keys, values = (
            paged_sequences(
                op, x, kv_heads, key_lengths, block_table, block_size, batch=len(queries)
            )
            for x in (key, value)
        )
    if len(keys) < len(queries):
        raise ValueError(f"{op}: queries of {len(queries)} sequences, keys of {len(keys)}")

    output, lse = infer_output(query, layout, heads, with_lse=True)
    outputs = split_sequences(op, output.zero_(), layout, heads, query_lengths)
    lse_layout = "TND" if layout == "TND" else "BNSD"
    lses = split_sequences(op, lse.zero_(), lse_layout, heads, query_lengths)
    for i, q in enumerate(queries):
        out, total = attend(q, keys[i], values[i], scale=scale, visibility=visibility, sink=sink)
        outputs[i].copy_(out)
        lses[i].copy_(total.unsqueeze(-1))
    return output, lse if with_lse else lse.new_zeros(1)


def infer_output(
    query: Tensor, layout: str, heads: int, *, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Allocate ``(output, lse)`` of the right shapes, uninitialised; see fused_attention."""
    output = query.new_empty(query.shape)
    if not with_lse:
        return output, query.new_empty(1, dtype=torch.float32)
    if layout == "TND":
        shape = (*query.shape[:2], 1)
    else:
        sequence = query.shape[2] if layout == "BNSD" else query.shape[1]
        shape = (query.shape[0], heads, sequence, 1)
    return output, query.new_empty(shape, dtype=torch.float32)


def write_out(
    op: str, out: Sequence[Tensor], result: tuple[Tensor, Tensor], with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Copy a result into a caller's tensors, as the ``.out`` operators do.

    Args:
        op: The operator's name, for messages.
        out: ``[output, lse]``; ``output`` may have any shape of the right size.
        result: What fused_attention gave.
        with_lse: Whether ``lse`` was asked for; if not, ``out[1]`` is left alone.

    Returns:
        ``out``.

    Raises:
        ValueError: If ``out[0]`` has another size.
    """
    output, lse = result
    if out[0].numel() != output.numel():
        raise ValueError(
            f"{op}.out: out[0] has shape {tuple(out[0].shape)}; expected {tuple(output.shape)}"
        )
    out[0].copy_(output.view(out[0].shape))
    if with_lse:
        out[1].copy_(lse.view(out[1].shape))
    return out[0], out[1]


@kernel(f"npu::{_V1}")
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: Sequence[int] | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_rope_antiquant_scale: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(query, key, value, *, ...) -> (attention_out, softmax_lse)``; see fused_attention.

    ``inner_precise`` chooses between precision and speed on the device; it changes nothing here.
    """
    del inner_precise
    unsupported(
        _V1,
        pse_shift=pse_shift,
        dequant_scale1=dequant_scale1,
        quant_scale1=quant_scale1,
        dequant_scale2=dequant_scale2,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        key_antiquant_scale=key_antiquant_scale,
        key_antiquant_offset=key_antiquant_offset,
        value_antiquant_scale=value_antiquant_scale,
        value_antiquant_offset=value_antiquant_offset,
        query_padding_size=query_padding_size,
        kv_padding_size=kv_padding_size,
        key_shared_prefix=key_shared_prefix,
        value_shared_prefix=value_shared_prefix,
        actual_shared_prefix_len=actual_shared_prefix_len,
        query_rope=query_rope,
        key_rope=key_rope,
        key_rope_antiquant_scale=key_rope_antiquant_scale,
        antiquant_mode=antiquant_mode,
        key_antiquant_mode=key_antiquant_mode,
        value_antiquant_mode=value_antiquant_mode,
    )
    return fused_attention(
        _V1,
        query,
        key,
        value,
        layout=input_layout,
        heads=num_heads,
        kv_heads=num_key_value_heads,
        scale=scale,
        visibility=visibility_of(_V1, sparse_mode, atten_mask, pre_tokens, next_tokens),
        query_lengths=actual_seq_lengths,
        key_lengths=actual_seq_lengths_kv,
        block_table=block_table,
        block_size=block_size,
        sink=None,
        with_lse=softmax_lse_flag,
    )


@kernel(f"npu::{_V1}.out")
def npu_fused_infer_attention_score_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out: Sequence[Tensor],
    workspace: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``(..., *, ..., Tensor? workspace, Tensor[] out) -> (Tensor, Tensor)``.

    Writes ``out[0]``, and ``out[1]`` if ``softmax_lse_flag`` is set, though the schema carries no
    alias annotation; returns the two. ``options`` are those of the operator without ``.out``.
    """
    del workspace
    result = npu_fused_infer_attention_score(query, key, value, **options)
    return write_out(_V1, out, result, options.get("softmax_lse_flag", False))


@kernel(f"npu::_{_V1}_get_max_workspace", f"npu::_{_V1}_v2_get_max_workspace")
def npu_fused_infer_attention_score_get_max_workspace(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """``(the operator's own arguments) -> Tensor``: ``[bytes]`` uint8, for ``workspace``."""
    del key, value, options
    return query.new_zeros(_WORKSPACE_BYTES, dtype=torch.uint8)


@kernel(f"npu::_{_V1}_infer_output")
def npu_fused_infer_attention_score_infer_output(
    query: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    quant_scale2: Tensor | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False,
    query_rope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``-> (attention_out, softmax_lse)``, allocated and not computed."""
    del value, block_table, num_key_value_heads
    unsupported(f"_{_V1}_infer_output", quant_scale2=quant_scale2, query_rope=query_rope)
    return infer_output(query, input_layout, num_heads, with_lse=softmax_lse_flag)
