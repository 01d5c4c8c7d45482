"""Runs Triton kernels on the host: the interpreter that ships with Triton, posing as an NPU.

vllm-ascend's Triton kernels are written for triton-ascend, which compiles for the device. Triton
itself can interpret a kernel with NumPy instead (``TRITON_INTERPRET=1``). :func:`install` makes the
two meet: it announces an ``npu`` driver, feeds the interpreter CPU tensors over the simulated
device's memory, hands each launch to a stream, and supplies what triton-ascend adds to Triton.
Nothing of Triton is changed on disk.

Each change to Triton is a function of its own here, with its reason; ``triton_cann`` has the
modules that only triton-ascend brings.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from ascend_opt.simnpu import triton_cann

Alias = Callable[[Tensor], Tensor]
"""Gives a CPU tensor over the same bytes as an npu tensor."""

Launch = Callable[[str, Callable[[], None]], None]
"""Enqueues, records or runs a kernel, given its name and its body, on the current stream."""

# Kernels launch one program per core and loop over the rest. Every program is interpreted, so a
# real device's 40 vector cores would cost 40 times the overhead; a few exercise the split as well.
_DEVICE_PROPERTIES = {
    "num_aicore": 2,
    "num_vectorcore": 4,
    "multiprocessor_count": 2,
    "max_shared_mem": 192 * 1024,
}

# The interpreter keeps its grid and its view of triton.language in globals.
_interpreter_lock = threading.RLock()


def install(triton: ModuleType, alias: Alias, launch: Launch) -> None:
    """Make Triton run its kernels on the host, over the simulated device's memory.

    Call it once, when triton has been imported and before a kernel is launched. Calling it again
    replaces ``alias`` and ``launch``.

    Args:
        triton: The imported package.
        alias: See :data:`Alias`. Called for tensors off the CPU, when a kernel is launched.
        launch: See :data:`Launch`. The body holds what the arguments were at launch, so it may run
            at any later time, more than once, and on any thread.

    Raises:
        RuntimeError: If triton was imported without interpreter mode.
    """
    import triton.runtime.interpreter as interpreter

    if not isinstance(triton.language.standard.cdiv, interpreter.InterpretedFunction):
        raise RuntimeError(
            "triton was imported to compile kernels; set TRITON_INTERPRET=1 before it is imported"
        )
    _announce_driver(triton)
    _allow_any_block_size(triton)
    _type_comparisons_as_bool(triton, interpreter)
    _interpret_language_for_good(triton, interpreter)
    interpreter.GridExecutor.__call__ = _grid_call(interpreter, alias, launch)
    triton_cann.install(triton)


def compute_nothing(library: Callable[[], ModuleType]) -> None:
    """Let launches return at once, but for what an engine needs for its books.

    Args:
        library: Returns the operator library: ``kernels_with_books()`` names the kernels whose
            effect an engine reads back, ``keep_books(name, tensors)`` launches one of those, given
            its tensors by parameter, and ``launch_nothing(name)`` any other. Called when a kernel
            is launched.
    """
    import triton.runtime.interpreter as interpreter

    @functools.cache
    def loaded() -> tuple[ModuleType, frozenset[str]]:
        dispatch = library()
        return dispatch, frozenset(dispatch.kernels_with_books())

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid
        name = self.fn.__name__
        if warmup:
            return
        dispatch, known = loaded()
        if name not in known:
            dispatch.launch_nothing(f"triton::{name}")
            return
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        dispatch.keep_books(name, {key: v for key, v in given.items() if isinstance(v, Tensor)})

    interpreter.InterpretedFunction.run = run


class NpuDriver:
    """What Triton, vLLM and vllm-ascend ask a driver; nothing is ever compiled or loaded by it."""

    utils = SimpleNamespace(get_device_properties=lambda device: dict(_DEVICE_PROPERTIES))

    @staticmethod
    def is_active() -> bool:
        """Tell that this is the driver of this machine."""
        return True

    def get_current_device(self) -> int:
        """Give the index of the device, of which there is one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Give a stream handle. The interpreter does not use it: ``launch`` knows the stream."""
        del device
        return 0

    def get_active_torch_device(self) -> Any:
        """Give the ``torch.device`` on which kernels run."""
        import torch

        return torch.device("npu", self.get_current_device())

    def get_device_interface(self) -> Any:
        """Give the module of ``torch`` that manages the device."""
        import torch

        return torch.npu

    def get_current_target(self) -> Any:
        """Give the compiler target, by which kernels choose between variants."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", "Ascend910B3", 0)


def _announce_driver(triton: ModuleType) -> None:
    """Leave ``npu`` as the only backend.

    vLLM switches Triton off unless exactly one backend has an active driver, and Triton's own CUDA
    and AMD backends look for their devices when asked.
    """
    from triton.backends import backends

    backends.clear()
    backends["npu"] = SimpleNamespace(compiler=None, driver=NpuDriver)
    triton.runtime.driver.set_active(NpuDriver())


def _allow_any_block_size(triton: ModuleType) -> None:
    """Accept blocks whose size is no power of two, as triton-ascend does.

    vllm-ascend's temperature kernel, among others, cuts the vocabulary into such blocks. The
    interpreter computes them as they are; only Triton's checks stand in the way.
    """
    from triton.language.semantic import TritonSemantic

    triton._utils.is_power_of_two = lambda size: size > 0
    if getattr(TritonSemantic.arange, "_any_size", False):
        return
    original = TritonSemantic.arange

    def arange(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        size = end - start
        if size <= 0 or size & (size - 1) == 0:
            return original(self, start, end, ret_ty=ret_ty)
        ret_ty = ret_ty or triton.language.block_type(triton.language.int32, [size])
        range_handle = self.builder.create_make_range(ret_ty.to_ir(self.builder), start, end)
        return self.make_tensor(range_handle, ret_ty)

    arange._any_size = True  # type: ignore[attr-defined]
    TritonSemantic.arange = arange


def _type_comparisons_as_bool(triton: ModuleType, interpreter: ModuleType) -> None:
    """Give comparisons the type int1.

    The interpreter of Triton 3.9.0 labels the result of a comparison with the type of its operands.
    When a scalar result is then spread over a block, it turns into such numbers again: as floats,
    ``mask & (temperature != 0.0)`` fails, as integers it is refused as a mask.
    """
    comparisons = {
        "LT": np.less,
        "GT": np.greater,
        "LE": np.less_equal,
        "GE": np.greater_equal,
        "EQ": np.equal,
        "NE": np.not_equal,
    }

    def compare(ufunc: Any) -> Callable[[Any, Any, Any], Any]:
        def create(self: Any, lhs: Any, rhs: Any) -> Any:
            del self
            result = np.asarray(ufunc(lhs.data, rhs.data), dtype=np.bool_)
            return interpreter.TensorHandle(result, triton.language.int1)

        return create

    builder = interpreter.InterpreterBuilder
    for name in [name for name in vars(builder) if name.startswith(("create_fcmp", "create_icmp"))]:
        setattr(builder, name, compare(comparisons[name[-2:]]))


def _interpret_language_for_good(triton: ModuleType, interpreter: Any) -> None:
    """Replace the functions of ``triton.language`` by the interpreter's once and for all.

    The interpreter replaces them before each launch and at each call of a device function, and puts
    them back after the launch, to leave the language intact for compilation. Nothing is compiled
    here, and it takes 40% of the time of a small launch.
    """
    if getattr(interpreter._patch_lang, "_for_good", False):
        return
    language = triton.language
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))

    def patch_nothing(fn: Any) -> Any:
        del fn
        return SimpleNamespace(restore=lambda: None)

    patch_nothing._for_good = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_nothing


def _grid_call(interpreter: ModuleType, alias: Alias, launch: Launch) -> Callable[..., None]:
    """Make the function that launches a kernel over a grid.

    The interpreter's own copies every argument's whole storage to the host and back. Here arguments
    are host memory already, and they are bound now, to be used when the stream gets there.
    """

    def to_host(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return argument if argument.device.type == "cpu" else alias(argument)
        if isinstance(argument, interpreter.triton.runtime.jit.TensorWrapper):
            return type(argument)(to_host(argument.base), argument.dtype)
        if isinstance(argument, interpreter.TensorDescriptor):
            raise NotImplementedError(
                "simnpu: a tensor descriptor as a kernel argument; pass pointer and strides"
            )
        if type(argument) in (list, tuple):
            return tuple(to_host(item) for item in argument)
        return argument

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        accepted = inspect.signature(self.fn).parameters
        # Compilers' options, such as num_warps and multibuffer, are no parameters of the kernel.
        kwargs = {name: to_host(value) for name, value in kwargs.items() if name in accepted}
        host_args = [to_host(value) for value in args]
        bound = inspect.getcallargs(self.fn, *host_args, **kwargs)
        grid = self.grid(bound) if callable(self.grid) else self.grid
        sizes = tuple(int(size) for size in grid)
        sizes += (1,) * (3 - len(sizes))
        converted = {
            name: value if name in self.constexprs else interpreter._implicit_cvt(value)
            for name, value in bound.items()
        }

        def body() -> None:
            with _interpreter_lock:
                for hook in self.pre_run_hooks:
                    hook(*host_args, **kwargs)
                _run_grid(interpreter, self.fn, sizes, converted)

        # A pointer is a bare address in ``converted``: ``host_args`` and ``kwargs``, which the body
        # refers to, are what keeps its memory alive until then.
        launch(f"triton::{self.fn.__name__}", body)

    return call


def _run_grid(
    interpreter: ModuleType, fn: Callable[..., None], sizes: tuple[int, ...], args: dict[str, Any]
) -> None:
    """Run every program of a grid, one after the other."""
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*sizes)
    try:
        for index in np.ndindex(*sizes):
            builder.set_grid_idx(*index)
            fn(**args)
    except Exception as error:
        raise interpreter.InterpreterError(
            f"simnpu: Triton kernel {fn.__name__}, grid {sizes}: {error!r}"
        ) from error
