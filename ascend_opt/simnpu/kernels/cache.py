"""Writing and reading the paged KV cache.

A *slot* is ``block * block_size + offset``. A negative slot marks a padding token: nothing is
written for it. A cache is laid out in one of three ways, all of which have the offset within the
block second to last, or second:

- ``[blocks, block_size, heads, head_size]``, the normal one;
- ``[blocks, heads, block_size, head_size]``, heads first (NHSD);
- ``[blocks, c, block_size, n]`` or ``[blocks, heads, c, block_size, n]``, the fractal format (NZ):
  each token's vector cut in pieces of n elements.
"""

import torch
from torch import Tensor

from ascend_opt.simnpu.kernels.registry import kernel, meta, unsupported


def write_slots(tokens: Tensor, paged: Tensor, slots: Tensor) -> None:
    """Write one vector per token into ``paged``, in place.

    Args:
        tokens: ``[tokens, ...]``; rows past the last slot are padding and are not written.
        paged: A view ``[blocks, block_size, ...]`` of the cache, each token's elements in order.
        slots: ``[slots]``, ``slots <= tokens``, integers.

    Raises:
        ValueError: If there are more slots than tokens, or a slot lies outside the cache.
    """
    slots = slots.flatten().long()
    if slots.numel() > tokens.shape[0]:
        raise ValueError(
            f"{slots.numel()} slots for {tokens.shape[0]} tokens; expected at most one per token"
        )
    written = slots >= 0
    slots = slots[written]
    blocks, block_size = paged.shape[:2]
    if slots.numel() and int(slots.max()) >= blocks * block_size:
        raise ValueError(
            f"slot {int(slots.max())} lies outside a cache of {blocks} blocks of {block_size}; "
            "check the slot mapping"
        )
    rows = tokens[: written.numel()][written].reshape(-1, *paged.shape[2:])
    paged[slots // block_size, slots % block_size] = rows.to(paged.dtype)


def _block_offset_first(op: str, cache: Tensor, cache_mode: str | None) -> Tensor:
    """View a cache of any layout as ``[blocks, block_size, ...]``."""
    if cache_mode in (None, "Norm"):
        return cache
    if cache_mode in ("PA_NZ", "NHSD"):
        return cache.movedim(-2, 1)
    raise NotImplementedError(
        f"simnpu: {op} got cache_mode={cache_mode!r}; expected None, 'Norm' or 'PA_NZ'"
    )


@kernel("npu::npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """``(key, value, key_cache!, value_cache!, slot_mapping, *, ..., cache_mode) -> ()``.

    Args:
        key: ``[tokens, heads, head_size]``.
        value: ``[tokens, heads, value_head_size]``.
        key_cache: Normal or NZ layout, as cache_mode says; written in place.
        value_cache: Likewise.
        slot_mapping: ``[tokens]``, int32 or int64; negative for padding.
        compress_lens: Not implemented (compressed cache), as are the next two.
        compress_seq_offsets: Not implemented.
        seq_lens: Not implemented.
        cache_mode: None or ``Norm``, or ``PA_NZ``.
    """
    op = "npu_scatter_pa_kv_cache"
    unsupported(
        op,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
    )
    write_slots(key, _block_offset_first(op, key_cache, cache_mode), slot_mapping)
    write_slots(value, _block_offset_first(op, value_cache, cache_mode), slot_mapping)


@kernel("npu::npu_scatter_pa_kv_cache_functional")
def npu_scatter_pa_kv_cache_functional(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[Tensor, Tensor]:
    """As :func:`npu_scatter_pa_kv_cache`, on copies: ``-> (key_cache, value_cache)``."""
    caches = key_cache.clone(), value_cache.clone()
    npu_scatter_pa_kv_cache(
        key,
        value,
        *caches,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
        cache_mode=cache_mode,
    )
    return caches


@kernel("_C_ascend::npu_scatter_pa_kv_cache")
def c_ascend_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str = "Norm",
    scatter_mode: str = "None",
) -> None:
    """``(key, value, key_cache!, value_cache!, slot_mapping, *, cache_mode, scatter_mode) -> ()``.

    As :func:`npu_scatter_pa_kv_cache`; ``scatter_mode="NHSD"`` writes caches laid out heads first.
    """
    op = "_C_ascend.npu_scatter_pa_kv_cache"
    if scatter_mode not in ("None", "NHSD"):
        unsupported(op, scatter_mode=scatter_mode)
    layout = "NHSD" if scatter_mode == "NHSD" else cache_mode
    write_slots(key, _block_offset_first(op, key_cache, layout), slot_mapping)
    write_slots(value, _block_offset_first(op, value_cache, layout), slot_mapping)


@meta("_C_ascend::npu_scatter_pa_kv_cache")
def c_ascend_scatter_pa_kv_cache_shape(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str = "Norm",
    scatter_mode: str = "None",
) -> None:
    """Nothing is returned, so there is no shape to compute."""


@kernel("atb::_npu_reshape_and_cache")
def npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """``(key, value, key_cache!, value_cache!, slot_indices) -> ()``; normal layout only."""
    write_slots(key, key_cache, slot_indices)
    write_slots(value, value_cache, slot_indices)


@kernel("atb::_npu_reshape_and_cache_siso")
def npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """``(key, key_cache!, slot_indices) -> ()``: one cache instead of two."""
    write_slots(key, key_cache, slot_indices)


@kernel("npu::npu_gather_pa_kv_cache")
def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """``(key_cache, value_cache, block_tables, seq_lens, key!, value!, *, ...) -> ()``.

    Reads each sequence's tokens out of the pages, one sequence after the other.

    Args:
        key_cache: ``[blocks, block_size, heads, head_size]``.
        value_cache: Likewise.
        block_tables: ``[batch, max_blocks]``: the blocks of each sequence, in order.
        seq_lens: ``[batch]`` lengths in tokens; ``[batch + 1]`` offsets if cumulative.
        key: ``[tokens, heads, head_size]``; written in place, rows past the total left alone.
        value: Likewise.
        seq_offset: ``[batch]``: how many tokens to skip at each sequence's start, a multiple of
            the block size on the device; None for none.
        is_seq_lens_cumsum: Whether ``seq_lens`` holds offsets.
    """
    lengths = seq_lens.long().diff() if is_seq_lens_cumsum else seq_lens.long()
    skips = torch.zeros_like(lengths) if seq_offset is None else seq_offset.long()
    block_size = key_cache.shape[1]
    start = 0
    for blocks, length, skip in zip(
        block_tables.long(), lengths.tolist(), skips.tolist(), strict=True
    ):
        position = torch.arange(skip, skip + length)
        page = blocks[position // block_size], position % block_size
        for paged, dense in ((key_cache, key), (value_cache, value)):
            dense[start : start + length] = paged[page].reshape(length, *dense.shape[1:])
        start += length
