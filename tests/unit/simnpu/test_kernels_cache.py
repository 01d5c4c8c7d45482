"""KV cache kernels against copies made one token at a time."""

import pytest
import torch

from ascend_opt.simnpu.kernels import KERNELS

SCATTER = KERNELS["npu::npu_scatter_pa_kv_cache"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def make_tensor(*shape, dtype=torch.float32, seed=0):
    """Draw normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written(cache, tokens, slots):
    """What [blocks, block_size, heads, d] holds after the tokens were written, one at a time."""
    result = cache.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            result[slot // cache.shape[1], slot % cache.shape[1]] = tokens[row]
    return result


@DTYPES
@pytest.mark.parametrize("slots", [[5, 0, -1, 11], [-1, -1, -1, -1], [], [3]])
def test_scatter_writes_each_token_to_its_slot(dtype, slots):
    """Slots say where; -1 and tokens without a slot are padding; everything else stays."""
    key, value = make_tensor(4, 2, 3, dtype=dtype), make_tensor(4, 2, 5, dtype=dtype, seed=1)
    key_cache, value_cache = (make_tensor(3, 4, 2, d, dtype=dtype, seed=d) for d in (3, 5))
    expected = written(key_cache, key, slots), written(value_cache, value, slots)

    result = SCATTER(
        key,
        value,
        key_cache,
        value_cache,
        torch.tensor(slots, dtype=torch.int32),
        cache_mode="Norm",
    )

    assert result is None
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


@pytest.mark.parametrize("name", ["_npu_reshape_and_cache", "_npu_reshape_and_cache_siso"])
def test_atb_writes_alike(name):
    """The ATB operators write the same places, for two caches or for one."""
    key, value = make_tensor(3, 2, 4), make_tensor(3, 2, 4, seed=1)
    caches = [make_tensor(2, 4, 2, 4, seed=2), make_tensor(2, 4, 2, 4, seed=3)]
    slots = [6, -1, 1]
    expected = [written(c, t, slots) for c, t in zip(caches, (key, value), strict=True)]
    count = 1 if name.endswith("siso") else 2

    KERNELS[f"atb::{name}"](*[key, value][:count], *caches[:count], torch.tensor(slots))

    for cache, want in list(zip(caches, expected, strict=True))[:count]:
        assert torch.equal(cache, want)


def test_functional_scatter_leaves_its_inputs():
    """The functional form returns new caches."""
    key, cache = make_tensor(2, 1, 4), make_tensor(2, 2, 1, 4, seed=1)
    before = cache.clone()

    new_key, new_value = KERNELS["npu::npu_scatter_pa_kv_cache_functional"](
        key, key, cache, cache, torch.tensor([3, 0]), cache_mode="Norm"
    )

    assert torch.equal(cache, before)
    assert torch.equal(new_key, written(cache, key, [3, 0]))
    assert torch.equal(new_value, new_key)


def test_heads_first_cache():
    """With scatter_mode NHSD the cache is [blocks, heads, block_size, d]."""
    key, value = make_tensor(3, 2, 4), make_tensor(3, 2, 4, seed=1)
    key_cache, value_cache = make_tensor(2, 2, 4, 4, seed=2), make_tensor(2, 2, 4, 4, seed=3)
    slots = [6, -1, 1]
    expected = [
        written(cache.transpose(1, 2), tokens, slots).transpose(1, 2)
        for cache, tokens in ((key_cache, key), (value_cache, value))
    ]

    KERNELS["_C_ascend::npu_scatter_pa_kv_cache"](
        key, value, key_cache, value_cache, torch.tensor(slots), scatter_mode="NHSD"
    )

    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


@pytest.mark.parametrize("shape", [(3, 2, 4, 4), (3, 2, 1, 4, 4)])
def test_fractal_cache(shape):
    """NZ keeps each token's vector in pieces of the last dimension, with or without a head axis."""
    key = make_tensor(2, 2, 4)
    cache = torch.zeros(shape)

    SCATTER(key, key, cache, torch.zeros(shape), torch.tensor([9, 2]))

    flat = cache.view(3, 2, 4, 4)
    for row, (block, offset) in enumerate([(2, 1), (0, 2)]):
        for piece in range(2):
            assert torch.equal(flat[block, piece, offset], key[row].flatten()[piece * 4 :][:4])
    assert int((cache != 0).sum()) == key.numel()


def test_slots_outside_the_cache_are_refused():
    """A slot past the last block, or more slots than tokens, names what it found."""
    key, cache = make_tensor(2, 1, 4), torch.zeros(2, 2, 1, 4)

    with pytest.raises(ValueError, match="slot 4 lies outside a cache of 2 blocks of 2"):
        SCATTER(key, key, cache, cache, torch.tensor([0, 4]), cache_mode="Norm")
    with pytest.raises(ValueError, match="3 slots for 2 tokens"):
        SCATTER(key, key, cache, cache, torch.tensor([0, 1, 2]), cache_mode="Norm")


def test_unimplemented_arguments_are_refused():
    """The compressed cache, and modes that do not exist, are refused by name."""
    key, cache, slots = make_tensor(2, 1, 4), torch.zeros(2, 2, 1, 4), torch.tensor([0, 1])

    with pytest.raises(NotImplementedError, match=r"npu_scatter_pa_kv_cache.*seq_lens"):
        SCATTER(key, key, cache, cache, slots, seq_lens=slots)
    with pytest.raises(NotImplementedError, match="cache_mode='Other'"):
        SCATTER(key, key, cache, cache, slots, cache_mode="Other")
    with pytest.raises(NotImplementedError, match="scatter_mode='Rope'"):
        KERNELS["_C_ascend::npu_scatter_pa_kv_cache"](
            key, key, cache, cache, slots, scatter_mode="Rope"
        )


@pytest.mark.parametrize("cumulative", [False, True])
def test_gather_reads_sequences_back(cumulative):
    """Gathering reads each sequence's tokens in order, and leaves rows past them alone."""
    cache, values = make_tensor(6, 4, 2, 3), make_tensor(6, 4, 2, 5, seed=1)
    table = torch.tensor([[4, 1, -1], [-1, -1, -1], [2, 0, 5]], dtype=torch.int32)
    lengths = torch.tensor([0, 6, 6, 15] if cumulative else [6, 0, 9], dtype=torch.int32)
    key, value = torch.full((16, 2, 3), 7.0), torch.full((16, 2, 5), 7.0)

    KERNELS["npu::npu_gather_pa_kv_cache"](
        cache, values, table, lengths, key, value, is_seq_lens_cumsum=cumulative
    )

    rows = [(4, 0), (4, 1), (4, 2), (4, 3), (1, 0), (1, 1)]
    rows += [(block, offset) for block in (2, 0) for offset in range(4)] + [(5, 0)]
    for t, (block, offset) in enumerate(rows):
        assert torch.equal(key[t], cache[block, offset])
        assert torch.equal(value[t], values[block, offset])
    assert torch.equal(key[15], torch.full((2, 3), 7.0))


def test_gather_skips_an_offset():
    """An offset leaves out the start of a sequence."""
    cache = make_tensor(3, 4, 1, 2)
    key, value = torch.empty(3, 1, 2), torch.empty(3, 1, 2)

    KERNELS["npu::npu_gather_pa_kv_cache"](
        cache,
        cache,
        torch.tensor([[2, 0]]),
        torch.tensor([3]),
        key,
        value,
        seq_offset=torch.tensor([4]),
    )

    assert torch.equal(key, cache[0, :3])
