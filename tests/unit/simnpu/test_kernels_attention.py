"""Attention kernels against attention computed one query and one head at a time, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_opt.simnpu.kernels import KERNELS

FIA = KERNELS["npu::npu_fused_infer_attention_score"]
FIA_V2 = KERNELS["npu::npu_fused_infer_attention_score_v2"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
SCALE = 0.3


def make_tensor(*shape, dtype=torch.float32, seed=0):
    """Draw normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(query, key, value, sees, sink=None):
    """Attention of one sequence by its definition.

    Args:
        query: [n, heads, d].
        key: [m, kv_heads, d].
        value: [m, kv_heads, d].
        sees: Of (query index, key index): whether the query sees the key.
        sink: [heads], or None.

    Returns:
        The output and the log-sum-exp of the scores.
    """
    query, key, value = query.double(), key.double(), value.double()
    heads = query.shape[1]
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64)
    for i in range(query.shape[0]):
        visible = [j for j in range(key.shape[0]) if sees(i, j)]
        for h in range(heads) if visible else ():
            group = h // (heads // key.shape[1])
            scores = torch.stack([query[i, h] @ key[j, group] * SCALE for j in visible])
            total = scores.exp().sum() + (0 if sink is None else sink[h].double().exp())
            lse[i, h] = total.log()
            output[i, h] = (scores.exp() / total) @ value[visible, group]
    return output, lse


def right_causal(n, m):
    """Query i of n stands at key m - n + i of m."""
    return lambda i, j: j <= i + m - n


def everything(i, j):
    """See every key."""
    return True


class Paged:
    """Sequences scattered over a paged cache, with a table whose unused entries are garbage."""

    def __init__(self, lengths, kv_heads, head_size, block_size, dtype=torch.float32, garbage=-1):
        generator = torch.Generator().manual_seed(7)
        per_sequence = [-(-n // block_size) for n in lengths]
        blocks = torch.randperm(sum(per_sequence) + 3, generator=generator).tolist()
        self.lengths, self.block_size, self.kv_heads = lengths, block_size, kv_heads
        width = max([*per_sequence, 1]) + 1
        self.table = torch.full((len(lengths), width), garbage, dtype=torch.int32)
        shape = (len(blocks), block_size, kv_heads, head_size)
        # What no sequence owns is not a number, so that reading it shows.
        self.keys = torch.full(shape, torch.nan, dtype=dtype)
        self.values = torch.full(shape, torch.nan, dtype=dtype)
        self.sequences = []
        for row, (length, count) in enumerate(zip(lengths, per_sequence, strict=True)):
            key, value = (
                make_tensor(length, kv_heads, head_size, dtype=dtype, seed=10 * row + s)
                for s in (1, 2)
            )
            self.sequences.append((key, value))
            own = [blocks.pop() for _ in range(count)]
            self.table[row, :count] = torch.tensor(own, dtype=torch.int32)
            for t in range(length):
                self.keys[own[t // block_size], t % block_size] = key[t]
                self.values[own[t // block_size], t % block_size] = value[t]

    def arguments(self):
        """What FIA takes for these keys, in the three-dimensional layout."""
        return {
            "key": self.keys.flatten(2),
            "value": self.values.flatten(2),
            "block_table": self.table,
            "block_size": self.block_size,
            "num_key_value_heads": self.kv_heads,
            "actual_seq_lengths_kv": self.lengths,
        }


def totals(lengths):
    """Running totals."""
    return torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (5, 1)])
def test_chunked_prefill_over_pages(dtype, heads, kv_heads):
    """A batch of decode steps, fresh prefills and later chunks: each query stands at its own place.

    Rows past the last sequence are padding, and come out as zeros.
    """
    lengths, chunks = [9, 4, 17, 1], [1, 4, 5, 1]
    pages = Paged(lengths, kv_heads, 6, block_size=4, dtype=dtype)
    query = make_tensor(sum(chunks) + 3, heads, 6, dtype=dtype)

    output, lse = FIA(
        query,
        **pages.arguments(),
        atten_mask=TRIANGLE,
        input_layout="TND",
        actual_seq_lengths=totals(chunks),
        num_heads=heads,
        scale=SCALE,
        sparse_mode=3,
        softmax_lse_flag=True,
    )

    start = 0
    for n, m, (key, value) in zip(chunks, lengths, pages.sequences, strict=True):
        rows = slice(start, start + n)
        expected, expected_lse = attend(query[rows], key, value, right_causal(n, m))
        torch.testing.assert_close(output[rows], expected.to(dtype))
        torch.testing.assert_close(lse[rows, :, 0], expected_lse.float())
        start += n
    assert start + 3 == output.shape[0]
    assert torch.equal(output[start:], torch.zeros_like(output[start:]))


@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 16]),
    heads_first=st.booleans(),
)
def test_any_batch_over_pages_equals_dense_attention(batch, block_size, heads_first):
    """Any mix of new and cached tokens, block size and cache layout gives the dense result."""
    chunks = [new for new, _ in batch]
    lengths = [new + cached for new, cached in batch]
    pages = Paged(lengths, 2, 4, block_size, garbage=2**31 - 1)
    arguments = pages.arguments()
    if heads_first:
        arguments["key"] = pages.keys.transpose(1, 2).contiguous()
        arguments["value"] = pages.values.transpose(1, 2).contiguous()
    query = make_tensor(sum(chunks), 4, 4)
    common = {
        "atten_mask": TRIANGLE,
        "input_layout": "TND",
        "actual_seq_lengths": totals(chunks),
        "num_heads": 4,
        "scale": SCALE,
        "sparse_mode": 3,
    }

    paged, _ = FIA(query, **arguments, **common)

    dense_key, dense_value = (torch.cat(parts) for parts in zip(*pages.sequences, strict=True))
    dense, _ = FIA(
        query,
        dense_key,
        dense_value,
        actual_seq_lengths_kv=totals(lengths),
        num_key_value_heads=2,
        **common,
    )
    assert torch.isfinite(paged).all()
    torch.testing.assert_close(paged, dense)


@pytest.mark.parametrize(
    ("mode", "sees"),
    [
        (0, everything),
        (2, lambda i, j: j <= i),
        (3, right_causal(5, 8)),
        (4, lambda i, j: -2 <= j - (i + 3) <= 1),
    ],
)
def test_sparse_modes(mode, sees):
    """Mode 0 sees all; 2 and 3 are causal from the left and the right end; 4 is a band."""
    query, key, value = (
        make_tensor(5, 2, 4),
        make_tensor(8, 2, 4, seed=1),
        make_tensor(8, 2, 4, seed=2),
    )

    output, _ = FIA(
        query,
        key,
        value,
        atten_mask=TRIANGLE if mode else None,
        input_layout="TND",
        actual_seq_lengths=[5],
        actual_seq_lengths_kv=[8],
        num_heads=2,
        scale=SCALE,
        sparse_mode=mode,
        pre_tokens=2,
        next_tokens=1,
    )

    torch.testing.assert_close(output, attend(query, key, value, sees)[0].float())


def test_long_prefill_is_causal_beyond_one_piece():
    """A prefill longer than what is computed at once is still causal throughout."""
    length = 300
    query, key, value = (make_tensor(length, 1, 4, seed=s) for s in range(3))

    output, _ = FIA(
        query,
        key,
        value,
        atten_mask=TRIANGLE,
        input_layout="TND",
        actual_seq_lengths=[length],
        actual_seq_lengths_kv=[length],
        scale=SCALE,
        sparse_mode=3,
    )

    for i in (0, 255, 256, 299):
        row = attend(query[i : i + 1], key[: i + 1], value[: i + 1], everything)[0]
        torch.testing.assert_close(output[i : i + 1], row.float())


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH"])
def test_batched_layouts(layout):
    """Batched layouts mean the same attention; each sequence ends at its own length."""
    query = make_tensor(2, 3, 4, 6)
    key, value = make_tensor(2, 5, 2, 6, seed=1), make_tensor(2, 5, 2, 6, seed=2)
    to_layout = {
        "BSND": lambda x: x,
        "BNSD": lambda x: x.transpose(1, 2).contiguous(),
        "BSH": lambda x: x.flatten(2),
    }[layout]

    output, lse = FIA(
        *(to_layout(x) for x in (query, key, value)),
        input_layout=layout,
        actual_seq_lengths=[3, 2],
        actual_seq_lengths_kv=[5, 4],
        num_heads=4,
        num_key_value_heads=2,
        scale=SCALE,
        softmax_lse_flag=True,
    )

    expected = torch.zeros_like(query)
    for b, (n, m) in enumerate([(3, 5), (2, 4)]):
        rows, row_lse = attend(query[b, :n], key[b, :m], value[b, :m], everything)
        expected[b, :n] = rows
        torch.testing.assert_close(lse[b, :, :n, 0], row_lse.T.float())
    torch.testing.assert_close(output, to_layout(expected))


def test_empty_batch_and_empty_sequences():
    """No sequence gives zeros for every padding row; a sequence of no keys gives zeros too."""
    query = make_tensor(2, 2, 4)
    common = {"input_layout": "TND", "num_heads": 2, "scale": SCALE}

    none, _ = FIA(query, query, query, actual_seq_lengths=[], actual_seq_lengths_kv=[], **common)
    pages = Paged([0, 3], 2, 4, block_size=4)
    some, _ = FIA(query, **pages.arguments(), actual_seq_lengths=[1, 2], **common)

    assert torch.equal(none, torch.zeros_like(query))
    assert torch.equal(some[0], torch.zeros(2, 4))
    torch.testing.assert_close(
        some[1:], attend(query[1:], *pages.sequences[1], everything)[0].float()
    )


def test_out_variant_writes_its_tensors():
    """A captured graph gets its result in out, of any shape; lse only where it is asked for."""
    query, key = make_tensor(3, 2, 4), make_tensor(3, 2, 4, seed=1)
    options = {
        "actual_seq_lengths": [3],
        "actual_seq_lengths_kv": [3],
        "input_layout": "TND",
        "num_heads": 2,
        "scale": SCALE,
    }
    expected, expected_lse = FIA(query, key, key, **options, softmax_lse_flag=True)
    workspace = KERNELS["npu::_npu_fused_infer_attention_score_get_max_workspace"](
        query=query, key=key, value=key, **options
    )
    out, untouched, lse = torch.empty(3, 8), torch.tensor([5.0]), torch.empty(3, 2, 1)
    fia_out = KERNELS["npu::npu_fused_infer_attention_score.out"]

    first, _ = fia_out(query, key, key, workspace=workspace, out=[out, untouched], **options)
    fia_out(query, key, key, out=[torch.empty(3, 8), lse], softmax_lse_flag=True, **options)

    assert first is out
    assert torch.equal(out, expected.flatten(1))
    assert untouched.item() == 5.0
    assert torch.equal(lse, expected_lse)
    with pytest.raises(ValueError, match=r"out\[0\] has shape"):
        fia_out(query, key, key, out=[torch.empty(2, 8), lse], **options)


@pytest.mark.parametrize("version", ["", "_v2"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_inferred_output_has_the_shape_of_the_result(version, with_lse):
    """What torch_npu allocates before it captures the .out variant fits what that writes."""
    query = make_tensor(3, 2, 4)
    names = (
        ("num_query_heads", "return_softmax_lse") if version else ("num_heads", "softmax_lse_flag")
    )
    lengths = ("qlen", "kvlen") if version else ("lengths", "lengths_kv")
    options = {"input_layout": "TND", names[0]: 2, names[1]: with_lse}
    op = f"npu_fused_infer_attention_score{version}"

    inferred = KERNELS[f"npu::_{op}_infer_output"](query, query, **options)
    real = KERNELS[f"npu::{op}"](
        query, query, query, **options, **{f"actual_seq_{name}": [3] for name in lengths}
    )

    assert [(x.shape, x.dtype) for x in inferred] == [(x.shape, x.dtype) for x in real]


def test_version_2_has_a_sink():
    """A sink takes weight from every key and gives none back; without one, both versions agree."""
    query, key = make_tensor(3, 4, 6), make_tensor(3, 2, 6, seed=1)
    sink = make_tensor(4, seed=2)
    options = {
        "input_layout": "TND",
        "num_key_value_heads": 2,
        "sparse_mode": 3,
        "atten_mask": TRIANGLE,
    }
    v2 = {
        "actual_seq_qlen": [3],
        "actual_seq_kvlen": [3],
        "num_query_heads": 4,
        "softmax_scale": SCALE,
    }

    plain, _ = FIA_V2(query, key, key, **options, **v2)
    sunk, lse = FIA_V2(
        query, key, key, **options, **v2, learnable_sink=sink, return_softmax_lse=True
    )

    first, _ = FIA(
        query,
        key,
        key,
        **options,
        actual_seq_lengths=[3],
        actual_seq_lengths_kv=[3],
        num_heads=4,
        scale=SCALE,
    )
    assert torch.equal(plain, first)
    expected, expected_lse = attend(query, key, key, right_causal(3, 3), sink)
    torch.testing.assert_close(sunk, expected.float())
    torch.testing.assert_close(lse[..., 0], expected_lse.float())


@DTYPES
@pytest.mark.parametrize("flat", [False, True])
def test_paged_attention_of_decode_steps(dtype, flat):
    """One query per sequence sees all of it; out is written, rows past the batch are left alone."""
    pages = Paged([5, 0, 13], 2, 6, block_size=4, dtype=dtype)
    query = make_tensor(4, 4, 6, dtype=dtype)
    out = torch.full_like(query, 8.0)
    shape = (4, 24) if flat else (4, 4, 6)

    KERNELS["atb::_npu_paged_attention"](
        query.view(shape),
        pages.keys,
        pages.values,
        num_kv_heads=2,
        num_heads=4,
        scale_value=SCALE,
        block_table=pages.table,
        context_lens=torch.tensor(pages.lengths, dtype=torch.int32),
        out=out.view(shape),
    )

    for row, (key, value) in enumerate(pages.sequences):
        expected, _ = attend(query[row : row + 1], key, value, everything)
        torch.testing.assert_close(out[row : row + 1], expected.to(dtype))
    assert torch.equal(out[3], torch.full_like(out[3], 8.0))


BAD_CALLS = {
    "quantised": (
        {"key_antiquant_scale": torch.ones(2)},
        NotImplementedError,
        "key_antiquant_scale",
    ),
    "position shift": ({"pse_shift": torch.ones(1)}, NotImplementedError, "pse_shift"),
    "explicit mask": ({"atten_mask": TRIANGLE}, NotImplementedError, "atten_mask"),
    "unknown mode": (
        {"sparse_mode": 9, "atten_mask": TRIANGLE},
        NotImplementedError,
        "sparse_mode=9",
    ),
    "unknown layout": ({"input_layout": "NSD"}, NotImplementedError, "input_layout='NSD'"),
    "causal without mask": ({"sparse_mode": 3}, ValueError, "without atten_mask"),
    "no lengths": ({"actual_seq_lengths": None}, ValueError, "running totals"),
    "too many tokens": ({"actual_seq_lengths": [4]}, ValueError, "within 3 tokens"),
    "falling totals": ({"actual_seq_lengths": [2, 1]}, ValueError, "ascending"),
    "fewer keys than queries": ({"actual_seq_lengths": [1, 3]}, ValueError, "keys of 1"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_refused(case):
    """What is not implemented or does not fit is refused, naming the operator and the argument."""
    change, error, message = BAD_CALLS[case]
    query = make_tensor(3, 2, 4)
    options = {
        "actual_seq_lengths": [3],
        "actual_seq_lengths_kv": [3],
        "input_layout": "TND",
        "num_heads": 2,
    }
    with pytest.raises(error, match="npu_fused_infer_attention_score") as caught:
        FIA(query, query, query, **{**options, **change})
    assert message in str(caught.value)


def test_bad_tables_are_refused():
    """A table that is too short, names a block that is not there, or another block size."""
    pages = Paged([5], 2, 4, block_size=4)
    query = make_tensor(1, 2, 4)

    def call(**change):
        arguments = {**pages.arguments(), "actual_seq_lengths": [1], **change}
        FIA(query, **arguments, input_layout="TND", num_heads=2)

    call()
    with pytest.raises(ValueError, match="cannot hold 5 tokens"):
        call(block_table=pages.table[:, :1])
    with pytest.raises(ValueError, match="names blocks"):
        call(block_table=torch.tensor([[0, 99]], dtype=torch.int32))
    with pytest.raises(ValueError, match="block_size=16"):
        call(block_size=16)
    with pytest.raises(ValueError, match="key length of each"):
        call(actual_seq_lengths_kv=None)
    with pytest.raises(NotImplementedError, match="NZ"):
        call(key=torch.zeros(3, 2, 1, 4, 4))


def test_paged_attention_refuses_what_does_not_fit():
    """Another number of key heads, or more sequences than queries, is named."""
    pages = Paged([5, 3], 2, 6, block_size=4)
    query = make_tensor(1, 4, 6)

    def call(kv_heads, rows):
        KERNELS["atb::_npu_paged_attention"](
            query[:rows],
            pages.keys,
            pages.values,
            kv_heads,
            4,
            SCALE,
            pages.table,
            torch.tensor(pages.lengths),
            torch.empty(rows, 4, 6),
        )

    with pytest.raises(ValueError, match="num_kv_heads=4 over a cache"):
        call(4, 1)
    with pytest.raises(ValueError, match="2 context lengths for 1 queries"):
        call(2, 1)
