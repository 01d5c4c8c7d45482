"""The top-k / top-p kernel against the rule applied to one row of Python numbers at a time."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ascend_opt.simnpu.kernels import KERNELS

TOP_K_TOP_P = KERNELS["npu::npu_top_k_top_p"]


def kept(row, k, p):
    """Indices that survive, and how close the cut by p was to one of the sums it compares."""
    order = sorted(range(len(row)), key=lambda i: (row[i], i))
    if k is not None:
        order = [i for i in order if row[i] >= row[order[len(row) - k]]]
    if p is None:
        return set(order), math.inf
    total = sum(math.exp(row[i]) for i in order)
    survivors, mass, margin = [], 0.0, math.inf
    for i in order:
        mass += math.exp(row[i]) / total
        margin = min(margin, abs(mass - (1 - p)))
        if mass > 1 - p:
            survivors.append(i)
    return {*survivors, order[-1]}, margin


# Multiples of 1/2 in a small range: ties are frequent.
LOGITS = st.lists(st.integers(-6, 6).map(lambda x: x / 2), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(row=LOGITS, data=st.data())
def test_survivors_are_those_of_the_rule(row, data):
    """Survivors keep their value, the others become -inf; ties are cut in order of index."""
    k = data.draw(st.none() | st.integers(1, len(row)))
    p = data.draw(st.floats(0.0, 1.0) if k is None else st.none() | st.floats(0.0, 1.0))
    survivors, margin = kept(row, k, p)
    assume(margin > 1e-4)

    filtered = TOP_K_TOP_P(
        torch.tensor([row]),
        None if p is None else torch.tensor([p]),
        None if k is None else torch.tensor([k], dtype=torch.int32),
    )

    expected = [x if i in survivors else -math.inf for i, x in enumerate(row)]
    assert filtered[0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_their_own_k_and_p(dtype):
    """Each row is cut by its own k and p; the dtype stays, and the input too."""
    logits = torch.tensor([[4.0, 1.0, 3.0, 2.0]] * 3).to(dtype)
    before = logits.clone()

    filtered = TOP_K_TOP_P(
        logits,
        torch.tensor([1.0, 0.7, 0.0], dtype=dtype),
        torch.tensor([2, 4, 4], dtype=torch.int32),
    )

    none = -math.inf
    assert filtered.tolist() == [[4, none, 3, none], [4, none, 3, none], [4, none, none, none]]
    assert filtered.dtype == dtype
    assert torch.equal(logits, before)


def test_empty_batch():
    """No rows in, no rows out."""
    empty = torch.empty(0, 5)
    assert TOP_K_TOP_P(empty, torch.empty(0), torch.empty(0, dtype=torch.int32)).shape == (0, 5)


def test_bad_filters_are_refused():
    """Neither filter, or a k that is not in the vocabulary."""
    logits = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="both None"):
        TOP_K_TOP_P(logits)
    for k in (0, 5):
        with pytest.raises(ValueError, match="expected 1 to 4"):
            TOP_K_TOP_P(logits, None, torch.tensor([k]))
