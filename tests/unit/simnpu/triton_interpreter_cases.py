"""Triton kernels on the host: each kind of thing that vllm-ascend's kernels do.

Run by test_triton_interpreter.py in a process of its own, or by hand with TRITON_INTERPRET=1.
"""
# Kernels are as Triton wants them: constants in capitals, and their docstring in the test.
# ruff: noqa: N803

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from ascend_opt.simnpu.triton_interpreter import compute_nothing, install


class Stream:
    """Keeps what was launched, and runs it when told to."""

    def __init__(self):
        self.launched = []

    def launch(self, name, body):
        """Enqueue."""
        self.launched.append((name, body))

    def synchronize(self):
        """Run what is enqueued, in order."""
        for _, body in self.launched:
            body()
        self.launched.clear()


@pytest.fixture
def stream():
    """A stream that Triton launches on; npu tensors do not occur."""
    stream = Stream()
    install(triton, None, stream.launch)
    return stream


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def test_a_launch_is_handed_over_with_its_arguments(stream):
    """Nothing runs before its time; then it uses the memory as it is, and scalars as they were.

    The grid, which may depend on the arguments, is settled at launch too.
    """
    x, y, programs = torch.arange(8.0), torch.zeros(8), [2]

    double[lambda meta: (programs[0] * meta["BLOCK"] // 4,)](x, y, 7, BLOCK=4)

    [(name, body)] = stream.launched
    assert name == "triton::double"
    assert torch.equal(y, torch.zeros(8))
    x += 1
    programs[0] = 0
    body()
    assert y.tolist() == [2, 4, 6, 8, 10, 12, 14, 0]
    x += 1
    body()
    assert y.tolist() == [4, 6, 8, 10, 12, 14, 16, 0]


def test_a_deferred_launch_keeps_its_memory_alive(stream):
    """Tensors that the caller drops stay until the kernel has run."""
    y = torch.zeros(1024)
    double[(1,)](torch.ones(1024), y, 1024, BLOCK=1024)
    scribble = [torch.full((1024,), 9.0) for _ in range(8)]

    stream.synchronize()

    assert len(scribble) == 8
    assert torch.equal(y, torch.full((1024,), 2.0))


@triton.jit
def add_pair(pair, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(pair[1] + at, tl.load(pair[0] + at) + n)


@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


def test_device_tensors_are_aliased_at_launch(stream):
    """Tensors off the CPU, in tuples and reinterpreted ones too, are replaced when launched."""
    memory = torch.arange(4.0)
    aliased = []

    def alias(tensor):
        aliased.append(tensor.device.type)
        return memory

    install(triton, alias, stream.launch)
    y, bits = torch.zeros(4), torch.zeros(4, dtype=torch.int32)

    add_pair[(1,)]((torch.empty(4, device="meta"), y), 1, BLOCK=4)
    copy[(1,)](triton.reinterpret(torch.empty(4, device="meta"), tl.int32), bits, BLOCK=4)

    assert aliased == ["meta", "meta"]
    memory += 10
    stream.synchronize()
    assert y.tolist() == [11, 12, 13, 14]
    assert torch.equal(bits, memory.view(torch.int32))


@triton.jit
def store_then_call(y, hook):
    tl.store(y, 1.0)
    hook()


def test_memory_is_not_copied_back_and_forth(stream):
    """A kernel writes the elements it stores to, at once, and no other byte of the storage."""
    y = torch.zeros(2)
    seen = []

    def hook():
        seen.append(y[0].item())
        y[1] = 5.0

    store_then_call[(1,)](y, hook)
    stream.synchronize()

    assert seen == [1.0]
    assert y.tolist() == [1.0, 5.0]


@triton.jit
def fill(y, BLOCK: tl.constexpr):
    tl.store(y + 1 + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32) + 3)


def test_block_sizes_need_not_be_powers_of_two(stream):
    """triton-ascend accepts any block size, in arange and in the shape of a block."""
    x, y = torch.arange(10.0), torch.zeros(10)

    double[(2,)](x, y, 10, BLOCK=6)
    fill[(1,)](y, BLOCK=5)
    stream.synchronize()

    assert y.tolist() == [0, 3, 3, 3, 3, 3, 12, 14, 16, 18]
    fill[(1,)](y, BLOCK=0)
    with pytest.raises(Exception, match="greater than the start"):
        stream.synchronize()


@triton.jit
def store_where(t, k, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    some = (tl.load(t) != 0.0) & (at < 3)
    tl.store(y + at, 1.0, mask=(tl.load(k) > 4) & some)


@pytest.mark.parametrize(
    ("t", "k", "expected"), [(0.5, 5, [1, 1, 1, 0]), (0.0, 5, [0] * 4), (0.5, 4, [0] * 4)]
)
def test_comparisons_of_scalars_are_masks(stream, t, k, expected):
    """A scalar comparison, of floats or of integers, joins the mask of a block."""
    y = torch.zeros(4)

    store_where[(1,)](torch.tensor([t]), torch.tensor([k]), y, BLOCK=4)
    stream.synchronize()

    assert y.tolist() == expected


@triton.jit
def is_number(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(y + at, (v == v).to(tl.int32))


def test_comparisons_of_nan(stream):
    """NaN equals nothing, itself included."""
    y = torch.full((2,), -1, dtype=torch.int32)

    is_number[(1,)](torch.tensor([float("nan"), 1.0]), y, BLOCK=2)
    stream.synchronize()

    assert y.tolist() == [0, 1]


def test_options_of_the_compiler_are_ignored(stream):
    """Options that are no parameters of the kernel, such as multibuffer, change nothing."""
    x, y = torch.arange(4.0), torch.zeros(4)

    double[(1,)](x, y, 4, BLOCK=4, num_warps=8, multibuffer=True)
    stream.synchronize()

    assert torch.equal(y, 2 * x)


@triton.jit
def take_apart(x, y, column):
    block = tl.load(x + tl.arange(0, 8)).reshape(2, 4)
    part = tl.extra.cann.extension.extract_slice(block, (0, 1), (2, 2), (1, 2))
    mixed = tl.extra.cann.extension.insert_slice(block, part + 100, [0, 0], [2, 2], [1, 1])
    tl.store(y + tl.arange(0, 8), mixed.reshape(8))
    tl.store(y + 8, tl.extra.cann.extension.get_element(block, (1, column)))


def test_cann_extension(stream):
    """Slices and elements of a block, by constant and by computed index; the block itself stays."""
    x, y = torch.arange(8.0), torch.zeros(9)

    take_apart[(1,)](x, y, 2)
    stream.synchronize()

    assert y.tolist() == [101, 103, 2, 3, 105, 107, 6, 7, 6]


@triton.jit
def round_and_test(x, y, nan, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(
        y + at, tl.extra.cann.libdevice.nearbyint(v) + tl.extra.cann.libdevice.tanh(tl.load(x))
    )
    tl.store(nan + at, tl.extra.cann.libdevice.isnan(v).to(tl.int32))


def test_cann_libdevice(stream):
    """Functions of blocks and of scalars, and predicates, which are masks."""
    x = torch.tensor([0.5, 1.5, float("nan"), -2.25])
    y, nan = torch.zeros(4), torch.zeros(4, dtype=torch.int32)

    round_and_test[(1,)](x, y, nan, BLOCK=4)
    stream.synchronize()

    torch.testing.assert_close(y, x.round() + x[0].tanh(), equal_nan=True)
    assert nan.tolist() == [0, 0, 1, 0]
    round_and_test[(1,)](x.bfloat16(), y, nan, BLOCK=4)
    with pytest.raises(Exception, match=r"libdevice.*bf16 tensor; cast it to float32 first"):
        stream.synchronize()


def test_cann_modules_can_be_imported(stream):
    """They are found by import and as attributes; what is missing fails, by name, when called."""
    import triton.language.extra.cann.extension as extension
    import triton.language.extra.libdevice as under_its_own_name
    from triton.language.extra.cann import libdevice

    assert tl.extra.cann.libdevice is libdevice
    assert tl.extra.cann.extension is extension
    assert under_its_own_name.isnan is libdevice.isnan
    missing = extension.sync_block_all
    with pytest.raises(NotImplementedError, match=r"cann\.extension\.sync_block_all"):
        missing(1)
    assert not hasattr(extension, "__wrapped__")


def test_driver_answers(stream):
    """There is one backend, it is active, and it says how many cores to split work over."""
    from triton.backends import backends

    assert [name for name, each in backends.items() if each.driver.is_active()] == ["npu"]
    active = triton.runtime.driver.active
    properties = active.utils.get_device_properties(0)
    assert properties["num_aicore"] > 0
    assert properties["num_vectorcore"] > 0
    assert active.get_current_target().backend == "npu"
    assert active.get_current_device() == active.get_current_stream(0) == 0


@triton.jit
def fail(x):
    tl.static_assert(False, "on purpose")


def test_a_failing_kernel_is_named(stream):
    """An error inside a kernel names the kernel and its grid, and leaves Triton usable."""
    fail[(3,)](torch.zeros(1))
    with pytest.raises(Exception, match=r"kernel fail, grid \(3, 1, 1\).*on purpose"):
        stream.synchronize()

    stream.launched.clear()
    y = torch.zeros(4)
    double[(1,)](torch.ones(4), y, 4, BLOCK=4)
    stream.synchronize()
    assert y.tolist() == [2] * 4


@triton.jit
def scaled(v, factor):
    return v * factor


@triton.jit
def scale_in_a_loop(x, y, BLOCK: tl.constexpr):
    for start in tl.range(0, 8, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(y + at, scaled(tl.load(x + at), tl.num_programs(0)) + tl.program_id(0))


def test_device_functions_and_programs(stream):
    """A kernel may call another jitted function; programs run in order and know their number."""
    x, y = torch.arange(8.0), torch.zeros(8)

    scale_in_a_loop[(3,)](x, y, BLOCK=4)
    stream.synchronize()

    assert torch.equal(y, 3 * x + 2)  # what the last program left


def test_without_compute_a_launch_returns_at_once(monkeypatch):
    """A kernel with books is handed its tensors; of any other only the name is left."""
    run = triton.runtime.interpreter.InterpretedFunction.run
    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", run)
    books, names = [], []
    library = SimpleNamespace(
        kernels_with_books=lambda: ["double"],
        keep_books=lambda name, given: books.append((name, given)),
        launch_nothing=names.append,
    )
    compute_nothing(lambda: library)
    x, y = torch.ones(8), torch.zeros(8)

    double[(2,)](x, y, n=8, BLOCK=4)
    undocumented = triton.jit(lambda p: None)
    undocumented[(1,)](x)

    [(name, given)] = books
    assert name == "double"
    assert given["x"] is x
    assert given["y"] is y
    assert set(given) == {"x", "y"}
    assert names == ["triton::<lambda>"]
    assert torch.equal(y, torch.zeros(8))
