"""Finding the sequences of a batch in a tensor: by layout, by running totals, by block table."""

from collections.abc import Sequence

from torch import Tensor


def split_sequences(
    op: str, x: Tensor, layout: str, heads: int, lengths: Sequence[int] | None
) -> list[Tensor]:
    """View each sequence of a dense tensor as ``[n, heads, d]``.

    Args:
        op: The operator's name, for messages.
        x: ``[tokens, heads, d]`` for TND; otherwise in the order of dimensions that the layout
            names (batch, sequence, heads, d; H stands for heads and d in one).
        layout: TND, BSND, BNSD or BSH.
        heads: Heads of ``x``.
        lengths: TND: the running total of tokens at each sequence's end. Otherwise the length of
            each sequence, one length for all of them, or None for everything there is.

    Returns:
        One view per sequence, in order.

    Raises:
        ValueError: If the lengths do not fit ``x``.
        NotImplementedError: For another layout.
    """
    if layout == "TND":
        return _split_tokens(op, x, lengths)
    if layout == "BSND":
        rows = x
    elif layout == "BNSD":
        rows = x.transpose(1, 2)
    elif layout == "BSH":
        rows = x.unflatten(2, (heads, -1))
    else:
        raise NotImplementedError(
            f"simnpu: {op} got input_layout={layout!r}; expected TND, BSND, BNSD or BSH"
        )
    batch, full = rows.shape[:2]
    counts = [full] * batch if lengths is None else _per_sequence(op, lengths, batch)
    if any(not 0 <= n <= full for n in counts):
        raise ValueError(f"{op}: sequence lengths {counts}; expected 0 to {full}")
    return [row[:n] for row, n in zip(rows, counts, strict=True)]


def _split_tokens(op: str, x: Tensor, lengths: Sequence[int] | None) -> list[Tensor]:
    if lengths is None:
        raise ValueError(f"{op}: the TND layout needs the running totals of the sequence lengths")
    ends = [int(n) for n in lengths]
    starts = [0, *ends[:-1]]
    if any(not a <= b <= x.shape[0] for a, b in zip(starts, ends, strict=False)):
        raise ValueError(
            f"{op}: sequences end at {ends}; expected ascending ends within {x.shape[0]} tokens"
        )
    return [x[a:b] for a, b in zip(starts, ends, strict=False)]


def paged_sequences(
    op: str,
    cache: Tensor,
    heads: int,
    lengths: Sequence[int] | None,
    block_table: Tensor,
    block_size: int,
    batch: int,
) -> list[Tensor]:
    """Read each sequence out of a paged cache, as ``[n, heads, d]``.

    Args:
        op: The operator's name, for messages.
        cache: ``[blocks, block_size, heads * d]`` or ``[blocks, heads, block_size, d]``.
        heads: Key heads.
        lengths: The length of each sequence, or one length for all of them.
        block_table: ``[>= batch, max_blocks]``, int32.
        block_size: As the caller states it; 0 if not stated.
        batch: Number of sequences.

    Returns:
        One fresh tensor per sequence.

    Raises:
        ValueError: If the lengths, the table or the block size do not fit.
        NotImplementedError: For the five-dimensional fractal (NZ) cache.
    """
    if cache.dim() not in (3, 4):
        raise NotImplementedError(
            f"simnpu: {op} over a cache of shape {tuple(cache.shape)} (NZ) is not implemented; "
            "expected [blocks, block_size, heads * d] or [blocks, heads, block_size, d]"
        )
    pages = cache.unflatten(2, (heads, -1)) if cache.dim() == 3 else cache.transpose(1, 2)
    if block_size and block_size != pages.shape[1]:
        raise ValueError(
            f"{op}: block_size={block_size}, but blocks of the cache {tuple(cache.shape)} hold "
            f"{pages.shape[1]} tokens"
        )
    if lengths is None:
        raise ValueError(f"{op}: a paged cache needs the key length of each sequence")
    if block_table.shape[0] < batch:
        raise ValueError(f"{op}: {block_table.shape[0]} block table rows for {batch} sequences")
    counts = _per_sequence(op, lengths, batch)
    return [read_pages(op, pages, block_table[i], n) for i, n in enumerate(counts)]


def read_pages(op: str, pages: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Gather one sequence's tokens from a paged cache.

    Args:
        op: The operator's name, for messages.
        pages: ``[blocks, block_size, ...]``.
        blocks: The sequence's row of the block table; entries past the last block used may hold
            anything.
        length: Tokens to read.

    Returns:
        ``[length, ...]``.

    Raises:
        ValueError: If the row has too few blocks, or names one outside the cache.
    """
    num_blocks, block_size = pages.shape[:2]
    used = blocks[: -(-length // block_size)].long()
    if used.numel() * block_size < length:
        raise ValueError(
            f"{op}: {blocks.numel()} blocks of {block_size} cannot hold {length} tokens; "
            "check the block table and the sequence lengths"
        )
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < num_blocks:
        raise ValueError(
            f"{op}: the block table names blocks {used.tolist()}; expected 0 to {num_blocks - 1}"
        )
    return pages[used].flatten(0, 1)[:length]


def _per_sequence(op: str, lengths: Sequence[int], batch: int) -> list[int]:
    counts = [int(n) for n in lengths]
    if len(counts) == 1:
        return counts * batch
    if len(counts) < batch:
        raise ValueError(f"{op}: {len(counts)} lengths for {batch} sequences; expected 1 or more")
    return counts[:batch]
