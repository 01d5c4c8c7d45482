# Arguments bear the names that the operators' schemas give them, `input` among them.
# ruff: noqa: A002
"""Rotary position embedding, in the forms that vllm-ascend calls.

Two pairings of the dimensions occur everywhere: ``half`` (GPT-NeoX: dimension i with i + d/2) and
``interleave`` (GPT-J: dimension 2i with 2i + 1). Arithmetic is float32, rounded once at the end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_opt.simnpu.kernels.registry import kernel, unsupported


def is_half(op: str, rotary_mode: str | None) -> bool:
    """Tell whether ``rotary_mode`` means half pairing.

    Args:
        op: The operator's name, for the message.
        rotary_mode: ``half``, ``interleave``, or ``interleaved`` as vllm-ascend spells it.

    Returns:
        True for half pairing, False for interleaved.

    Raises:
        NotImplementedError: For any other mode (such as ``quarter``).
    """
    if rotary_mode not in ("half", "interleave", "interleaved"):
        raise NotImplementedError(
            f"simnpu: {op} got rotary_mode={rotary_mode!r}; expected 'half' or 'interleave'"
        )
    return rotary_mode == "half"


def rotate_quarter_turn(x: Tensor, half: bool) -> Tensor:
    """Map each pair (a, b) of dimensions to (-b, a)."""
    if half:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    """Rotate the leading dimensions of each head; the rest passes through.

    Args:
        x: ``[..., d]``.
        cos: Broadcasts to ``[..., r]`` with ``r <= d``: one value per *dimension*, so each angle
            appears twice.
        sin: Like ``cos``.
        half: Which dimensions form a pair; see the module.

    Returns:
        A fresh tensor like ``x``.
    """
    rotary_dim = cos.shape[-1]
    head = x[..., :rotary_dim].float()
    rotated = head * cos.float() + rotate_quarter_turn(head, half) * sin.float()
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), -1)


def per_dimension(angles: Tensor, half: bool) -> Tensor:
    """Repeat a table of one value per *pair* ``[..., r/2]`` to one per dimension ``[..., r]``."""
    return torch.cat((angles, angles), -1) if half else angles.repeat_interleave(2, -1)


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, half: bool) -> Tensor:
    """Rotate ``[tokens, heads * head_size]`` by ``cos`` and ``sin`` of ``[tokens, r/2]``."""
    heads = x.reshape(x.shape[0], -1, head_size)
    table = [per_dimension(t, half).unsqueeze(1) for t in (cos, sin)]
    return apply_rotary(heads, table[0], table[1], half).reshape(x.shape)


@kernel("atb::_npu_rotary_embedding")
def npu_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
) -> None:
    """``(positions, query!, key!, head_size, cos_sin_cache, is_neox_style) -> ()``, in place.

    Args:
        positions: ``[tokens]``, integers.
        query: ``[tokens, heads * head_size]``; rotated in place.
        key: ``[tokens, kv_heads * head_size]``; rotated in place.
        head_size: Size of one head.
        cos_sin_cache: ``[max_position, r]``: cosines in the first half, sines in the second.
        is_neox_style: True for half pairing.
    """
    cos, sin = cos_sin_cache[positions.flatten().long()].chunk(2, -1)
    for x in (query, key):
        x.copy_(_rotate_heads(x, cos, sin, head_size, is_neox_style))


@kernel("npu::npu_mrope")
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Plain or multimodal rotary embedding from a table: ``-> (query, key)``, both fresh.

    Args:
        positions: ``[tokens]``, or ``[3, tokens]`` (time, height, width) with a section.
        query: ``[tokens, heads * head_size]``.
        key: ``[tokens, kv_heads * head_size]``.
        cos_sin_cache: ``[max_position, r]``: cosines in the first half, sines in the second.
        head_size: Size of one head; ``r`` may be smaller.
        mrope_section: How many of the ``r/2`` angles follow each of the three positions, in order.
            None or all zeros for plain rotary embedding.
        rotary_mode: ``half`` or ``interleave``.
        cache_mode: ``default``; the interleaved order of the sections is not implemented.

    Returns:
        The rotated query and key, shaped like the inputs.

    Raises:
        ValueError: If the section does not add up to ``r/2``, or the positions do not match it.
        NotImplementedError: For another cache_mode or rotary_mode.
    """
    half = is_half("npu_mrope", rotary_mode)
    cos, sin = cos_sin_cache[positions.long()].chunk(2, -1)
    if mrope_section is not None and any(mrope_section):
        unsupported("npu_mrope", cache_mode=None if cache_mode == "default" else cache_mode)
        if sum(mrope_section) != cos.shape[-1] or positions.dim() != 2:
            raise ValueError(
                f"npu_mrope: mrope_section={list(mrope_section)} with positions of shape "
                f"{tuple(positions.shape)}; expected a sum of {cos.shape[-1]} and [3, tokens]"
            )
        cos, sin = (_select_sections(t, mrope_section) for t in (cos, sin))
    elif positions.dim() != 1:
        raise ValueError(
            f"npu_mrope: positions of shape {tuple(positions.shape)} without mrope_section; "
            "expected [tokens]"
        )
    return (
        _rotate_heads(query, cos, sin, head_size, half),
        _rotate_heads(key, cos, sin, head_size, half),
    )


def _select_sections(table: Tensor, section: Sequence[int]) -> Tensor:
    """Take section i of ``[3, tokens, r/2]`` from row i, giving ``[tokens, r/2]``."""
    return torch.cat([part[i] for i, part in enumerate(table.split(list(section), -1))], -1)


@kernel("npu::npu_rotary_mul")
def npu_rotary_mul(
    input: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    rotate: Tensor | None = None,
) -> Tensor:
    """``(input, r1, r2, rotary_mode, rotate?) -> Tensor``: ``input * r1 + turned * r2``.

    Args:
        input: ``[..., d]``, four-dimensional on the device.
        r1: Cosines, one per dimension; broadcasts to ``input``.
        r2: Sines, likewise.
        rotary_mode: ``half`` or ``interleave``: how ``turned`` is made from ``input``.
        rotate: ``[d, d]``; if given, ``turned = input @ rotate`` and rotary_mode is ignored.

    Returns:
        A fresh tensor like ``input``.
    """
    x = input.float()
    if rotate is None:
        turned = rotate_quarter_turn(x, is_half("npu_rotary_mul", rotary_mode))
    else:
        turned = x @ rotate.float()
    return (x * r1.float() + turned * r2.float()).to(input.dtype)


@kernel("npu::npu_apply_rotary_pos_emb")
def npu_apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    """``(query, key, cos, sin, layout, rotary_mode) -> (query, key)``, both fresh.

    The device's own kernel writes into its inputs too; the schema does not say so, and neither
    does this one.

    Args:
        query: ``[batch, sequence, heads, d]``, or ``[tokens, heads, d]`` for TND.
        key: Like ``query`` with its own number of heads.
        cos: One value per dimension, 1 in place of heads; ``r <= d`` dimensions.
        sin: Like ``cos``.
        layout: ``BSND``, ``SBND``, ``BNSD`` or ``TND``; with cos and sin laid out alike, they all
            mean the same arithmetic.
        rotary_mode: ``half`` or ``interleave``.

    Returns:
        The rotated query and key.

    Raises:
        NotImplementedError: For another layout (older releases passed a number) or mode.
    """
    if layout not in ("BSND", "SBND", "BNSD", "TND"):
        unsupported("npu_apply_rotary_pos_emb", layout=layout)
    half = is_half("npu_apply_rotary_pos_emb", rotary_mode)
    return apply_rotary(query, cos, sin, half), apply_rotary(key, cos, sin, half)
