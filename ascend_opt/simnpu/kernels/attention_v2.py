"""Version 2 of fused infer attention score; see ``attention``, from which only names differ."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ascend_opt.simnpu.kernels.attention import (
    fused_attention,
    infer_output,
    visibility_of,
    write_out,
)
from ascend_opt.simnpu.kernels.registry import kernel, unsupported

_OP = "npu_fused_infer_attention_score_v2"
_NO_LIMIT = 2**31 - 1


@kernel(f"npu::{_OP}")
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **quantised: Any,
) -> tuple[Tensor, Tensor]:
    """``(query, key, value, *, ...) -> (attention_out, softmax_lse)``; see fused_attention.

    Args:
        query: As in fused_attention, like the arguments that are not listed.
        key: Likewise.
        value: Likewise.
        atten_mask: The fixed triangle in sparse modes 2 to 4, else None.
        actual_seq_qlen: Query lengths.
        actual_seq_kvlen: Key lengths.
        block_table: ``[batch, max_blocks]``, or None.
        learnable_sink: ``[heads]``, or None.
        num_query_heads: Query heads.
        num_key_value_heads: Key heads; 0 for as many.
        softmax_scale: Factor on the scores.
        pre_tokens: Sparse mode 4 only.
        next_tokens: Sparse mode 4 only.
        input_layout: TND, BSND, BNSD or BSH.
        sparse_mode: 0, 2, 3 or 4.
        block_size: Tokens in a block.
        inner_precise: Precision or speed on the device; changes nothing here.
        return_softmax_lse: Whether to return the logarithm of the softmax sum.
        quantised: The schema's other arguments (scales, offsets, dtypes, rope apart, position
            shift): none is implemented.
    """
    del inner_precise
    unsupported(_OP, **quantised)
    return fused_attention(
        _OP,
        query,
        key,
        value,
        layout=input_layout,
        heads=num_query_heads,
        kv_heads=num_key_value_heads,
        scale=softmax_scale,
        visibility=visibility_of(_OP, sparse_mode, atten_mask, pre_tokens, next_tokens),
        query_lengths=actual_seq_qlen,
        key_lengths=actual_seq_kvlen,
        block_table=block_table,
        block_size=block_size,
        sink=learnable_sink,
        with_lse=return_softmax_lse,
    )


@kernel(f"npu::{_OP}.out")
def npu_fused_infer_attention_score_v2_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out: Sequence[Tensor],
    workspace: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """As version 1's ``.out``: writes and returns ``out``."""
    del workspace
    result = npu_fused_infer_attention_score_v2(query, key, value, **options)
    return write_out(_OP, out, result, options.get("return_softmax_lse", False))


@kernel(f"npu::_{_OP}_infer_output")
def npu_fused_infer_attention_score_v2_infer_output(
    query: Tensor,
    value: Tensor,
    *,
    query_dtype: int | None = None,
    value_dtype: int | None = None,
    input_layout: str = "BSH",
    quant_scale_out: Tensor | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    return_softmax_lse: bool = False,
    query_rope: Tensor | None = None,
    out_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``-> (attention_out, softmax_lse)``, allocated and not computed."""
    del value, block_table, num_key_value_heads
    unsupported(
        f"_{_OP}_infer_output",
        query_dtype=query_dtype,
        value_dtype=value_dtype,
        quant_scale_out=quant_scale_out,
        query_rope=query_rope,
        out_dtype=out_dtype,
    )
    return infer_output(query, input_layout, num_query_heads, with_lse=return_softmax_lse)
