"""Rotary embedding kernels against rotations of pairs, one pair and one angle at a time."""

import math

import pytest
import torch

from ascend_opt.simnpu.kernels import KERNELS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
MODES = pytest.mark.parametrize("mode", ["half", "interleave"])


def make_tensor(*shape, dtype=torch.float32, seed=0):
    """Draw normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angle(position, pair, rotary_dim):
    """Angle of a pair at a position, with base 100."""
    return position * 100.0 ** (-2 * pair / rotary_dim)


def table(max_position, rotary_dim, dtype=torch.float32):
    """The table models keep: cosines of all pairs, then their sines."""
    angles = [
        [angle(p, i, rotary_dim) for i in range(rotary_dim // 2)] for p in range(max_position)
    ]
    grid = torch.tensor(angles, dtype=torch.float64)
    return torch.cat((grid.cos(), grid.sin()), -1).to(dtype)


def rotate(head, angles, mode):
    """Rotate pair i of one head by angle i, in plain Python; the rest stays."""
    result = [float(x) for x in head]
    for i, a in enumerate(angles):
        first, second = (i, i + len(angles)) if mode == "half" else (2 * i, 2 * i + 1)
        x, y = float(head[first]), float(head[second])
        result[first] = x * math.cos(a) - y * math.sin(a)
        result[second] = x * math.sin(a) + y * math.cos(a)
    return result


def rotate_all(x, positions, head_size, rotary_dim, mode):
    """Rotate [tokens, heads * head_size] with plain positions."""
    rows = []
    for row, position in zip(x.double().tolist(), positions.tolist(), strict=True):
        angles = [angle(position, i, rotary_dim) for i in range(rotary_dim // 2)]
        heads = [row[h : h + head_size] for h in range(0, len(row), head_size)]
        rows.append([value for head in heads for value in rotate(head, angles, mode)])
    return torch.tensor(rows, dtype=torch.float64).view(x.shape).to(x.dtype)


@DTYPES
@MODES
@pytest.mark.parametrize("rotary_dim", [8, 6])
def test_table_rotation_in_place(dtype, mode, rotary_dim):
    """Query and key, of different numbers of heads, are rotated in place, as far as rotary_dim."""
    positions = torch.tensor([3, 0, 40, 3])
    query, key = make_tensor(4, 3 * 8, dtype=dtype), make_tensor(4, 8, dtype=dtype, seed=1)
    expected = [rotate_all(x, positions, 8, rotary_dim, mode) for x in (query, key)]
    cache = table(41, rotary_dim, torch.float32)

    KERNELS["atb::_npu_rotary_embedding"](positions, query, key, 8, cache, mode == "half")

    tolerance = {"rtol": 1.6e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(query, expected[0], **tolerance)
    torch.testing.assert_close(key, expected[1], **tolerance)


@pytest.mark.parametrize("mode", ["half", "interleave", "interleaved"])
@pytest.mark.parametrize("section", [None, [0, 0, 0]])
def test_mrope_without_section_is_plain_rotation(mode, section):
    """An all-zero section, which vllm-ascend 0.30 passes, is none; the inputs stay as they are."""
    positions = torch.tensor([5, 1, 0])
    query, key = make_tensor(3, 2 * 8), make_tensor(3, 8, seed=1)
    before = query.clone()

    q, k = KERNELS["npu::npu_mrope"](
        positions, query, key, table(8, 6), 8, mrope_section=section, rotary_mode=mode
    )

    pairing = "half" if mode == "half" else "interleave"
    torch.testing.assert_close(q, rotate_all(query, positions, 8, 6, pairing))
    torch.testing.assert_close(k, rotate_all(key, positions, 8, 6, pairing))
    assert torch.equal(query, before)


def test_mrope_takes_each_section_from_its_own_position():
    """The first angles follow the time, the next the height, the last the width."""
    positions = torch.tensor([[1, 2], [7, 0], [4, 6]])
    query, key = make_tensor(2, 8), make_tensor(2, 8, seed=1)
    section = [2, 1, 1]

    q, _ = KERNELS["npu::npu_mrope"](positions, query, key, table(8, 8), 8, mrope_section=section)

    source = [0, 0, 1, 2]  # which row of positions pair i reads
    for token in range(2):
        angles = [angle(int(positions[source[i], token]), i, 8) for i in range(4)]
        expected = torch.tensor(rotate(query[token].double(), angles, "half")).float()
        torch.testing.assert_close(q[token], expected)


def test_mrope_refuses_what_does_not_fit():
    """A section that misses angles, or 2-D positions without one, name what they expected."""
    query = make_tensor(2, 8)
    mrope = KERNELS["npu::npu_mrope"]
    rows = torch.zeros(3, 2, dtype=torch.int64)

    with pytest.raises(ValueError, match="sum of 4"):
        mrope(rows, query, query, table(8, 8), 8, mrope_section=[1, 1, 1])
    with pytest.raises(ValueError, match="without mrope_section"):
        mrope(rows, query, query, table(8, 8), 8)
    with pytest.raises(NotImplementedError, match=r"npu_mrope.*quarter"):
        mrope(rows[0], query, query, table(8, 8), 8, rotary_mode="quarter")
    with pytest.raises(NotImplementedError, match=r"npu_mrope.*cache_mode"):
        mrope(rows, query, query, table(8, 8), 8, mrope_section=[2, 1, 1], cache_mode="interleave")


def per_dimension(positions, rotary_dim, mode):
    """Cosines and sines with one value per dimension, [1, tokens, 1, r]."""
    angles = torch.tensor(
        [[angle(p, i, rotary_dim) for i in range(rotary_dim // 2)] for p in positions.tolist()]
    )
    angles = angles.repeat(1, 2) if mode == "half" else angles.repeat_interleave(2, 1)
    return angles.cos()[None, :, None], angles.sin()[None, :, None]


@MODES
def test_rotary_mul_and_apply_rotate_given_angles(mode):
    """Both take cosines and sines per dimension; they agree with the table's rotation."""
    positions = torch.tensor([2, 9, 4])
    query, key = make_tensor(1, 3, 2, 8), make_tensor(1, 3, 1, 8, seed=1)
    cos, sin = per_dimension(positions, 8, mode)
    expected_q = rotate_all(query.view(3, 16), positions, 8, 8, mode).view_as(query)
    expected_k = rotate_all(key.view(3, 8), positions, 8, 8, mode).view_as(key)

    torch.testing.assert_close(KERNELS["npu::npu_rotary_mul"](query, cos, sin, mode), expected_q)
    q, k = KERNELS["npu::npu_apply_rotary_pos_emb"](query, key, cos, sin, "BSND", mode)
    torch.testing.assert_close(q, expected_q)
    torch.testing.assert_close(k, expected_k)


def test_rotary_mul_with_a_matrix():
    """A rotate matrix stands in for the pairing; the one that maps (a, b) to (-b, a) gives it."""
    x = make_tensor(1, 2, 3, 4)
    cos, sin = make_tensor(1, 2, 1, 4, seed=1), make_tensor(1, 2, 1, 4, seed=2)
    matrix = torch.zeros(4, 4)
    for first in (0, 2):
        matrix[first + 1, first], matrix[first, first + 1] = -1.0, 1.0

    with_matrix = KERNELS["npu::npu_rotary_mul"](x, cos, sin, "half", matrix)

    torch.testing.assert_close(
        with_matrix, KERNELS["npu::npu_rotary_mul"](x, cos, sin, "interleave")
    )


def test_apply_rotates_part_of_a_head():
    """Dimensions beyond those of cos and sin pass through."""
    x = make_tensor(1, 2, 1, 8)
    cos, sin = per_dimension(torch.tensor([1, 5]), 4, "half")

    q, _ = KERNELS["npu::npu_apply_rotary_pos_emb"](x, x, cos, sin)

    assert torch.equal(q[..., 4:], x[..., 4:])
    assert not torch.allclose(q[..., :4], x[..., :4])


def test_apply_refuses_an_unknown_layout():
    """Older releases passed a number for the layout."""
    x = make_tensor(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match="npu_apply_rotary_pos_emb got layout=1"):
        KERNELS["npu::npu_apply_rotary_pos_emb"](x, x, x, x, 1)
