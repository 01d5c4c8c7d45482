"""The arithmetic of attention over one sequence.

The operators in ``attention`` and ``paged_attention`` differ in layouts and argument names only;
what they compute is here, and where they find it in ``sequences``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Bounds the score matrix: a long prefill would otherwise need heads * n * n floats at once.
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class Visibility:
    """Which keys a query may see, by distance from its own position.

    The last query of a sequence stands at the last key (``right_aligned``), as in a decode step or
    a chunk of a prefill; otherwise the first stands at the first.

    Attributes:
        before: How many keys before its own position a query sees; None for all.
        after: How many keys after it; None for all.
        right_aligned: Where queries stand when there are fewer of them than keys.
    """

    before: int | None = None
    after: int | None = None
    right_aligned: bool = True

    def mask(self, rows: Tensor, num_queries: int, num_keys: int) -> Tensor | None:
        """Compute what some of the queries see.

        Args:
            rows: Indices of the queries, ``[r]``.
            num_queries: Queries of the sequence.
            num_keys: Keys of the sequence.

        Returns:
            ``[r, num_keys]``, True where visible; None if every query sees every key.
        """
        if self.before is None and self.after is None:
            return None
        position = rows + (num_keys - num_queries if self.right_aligned else 0)
        distance = torch.arange(num_keys).unsqueeze(0) - position.unsqueeze(1)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.before is not None:
            visible &= distance >= -self.before
        if self.after is not None:
            visible &= distance <= self.after
        return visible


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    visibility: Visibility,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: ``softmax(scale * q k^T) v``, in float32.

    Query heads share key heads in consecutive groups (GQA). A query that sees no key gives zeros.

    Args:
        query: ``[n, heads, d]``.
        key: ``[m, kv_heads, d]``.
        value: ``[m, kv_heads, dv]``.
        scale: Factor on the scores.
        visibility: Which keys each query sees.
        sink: ``[heads]``, one more logit per head that takes weight and has no value.

    Returns:
        ``(output, lse)``: ``[n, heads, dv]`` in the dtype of ``query``, and the logarithm of the
        sum of exponentials of the scores, ``[n, heads]`` in float32.

    Raises:
        ValueError: If ``heads`` is no multiple of ``kv_heads``.
    """
    num_queries, heads, _ = query.shape
    num_keys, kv_heads, _ = key.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} key heads; expected a multiple")
    keys = key.float().permute(1, 2, 0)  # [kv_heads, d, m]
    values = value.float().transpose(0, 1)  # [kv_heads, m, dv]
    sinks = None if sink is None else sink.float().view(kv_heads, -1, 1, 1)
    output = query.new_empty(num_queries, heads, value.shape[-1])
    lse = query.new_empty(num_queries, heads, dtype=torch.float32)
    for rows in torch.arange(num_queries).split(_ROWS_AT_A_TIME):
        # [kv_heads, group, r, d], so that one key head serves its whole group
        q = query[rows].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores = (q @ keys.unsqueeze(1)) * scale
        visible = visibility.mask(rows, num_queries, num_keys)
        if visible is not None:
            scores.masked_fill_(~visible, float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.expand_as(total))
        # A row without a visible key has total -inf, and -inf - -inf is not a number.
        weights = (scores - total).exp().nan_to_num_(0.0)
        mixed = weights @ values.unsqueeze(1)
        output[rows] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
        lse[rows] = total.squeeze(-1).permute(2, 0, 1).flatten(1)
    return output, lse
