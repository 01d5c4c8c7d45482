"""The modules that triton-ascend adds to Triton: ``triton.language.extra.cann`` and two below it.

``libdevice`` has mathematical functions, ``extension`` access to parts of a block. Both are written
for the interpreter: a tensor's value is the NumPy array in its handle.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

_PACKAGE = "triton.language.extra.cann"

_FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": np.ceil,
    "exp": np.exp,
    "floor": np.floor,
    "log": np.log,
    "log1p": np.log1p,
    "nearbyint": np.rint,
    "rint": np.rint,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "trunc": np.trunc,
}
_PREDICATES: dict[str, Callable[..., Any]] = {"isinf": np.isinf, "isnan": np.isnan}


def install(triton: ModuleType) -> None:
    """Put the modules where ``import`` and attribute access find them; idempotent.

    Args:
        triton: The imported package, in interpreter mode.
    """
    import triton.language.extra.libdevice as stubs

    package = ModuleType(_PACKAGE, "What triton-ascend adds to Triton, for the interpreter.")
    package.__path__ = []
    modules = {"libdevice": _libdevice(triton), "extension": _extension(triton)}
    for name, module in modules.items():
        setattr(package, name, module)
        sys.modules[module.__name__] = module
    sys.modules[_PACKAGE] = package
    triton.language.extra.cann = package
    # vLLM reaches the same functions under Triton's own name, where each is an empty stub that the
    # compiler replaces. The interpreter does not, so an empty stub would silently give None.
    for name, function in vars(modules["libdevice"]).items():
        if name in _FLOAT_FUNCTIONS or name in _PREDICATES:
            setattr(stubs, name, function)


def _module(name: str, doc: str) -> ModuleType:
    module = ModuleType(f"{_PACKAGE}.{name}", doc)

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        full_name = f"{_PACKAGE}.{name}.{attribute}"

        def call(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"simnpu: {full_name} is not implemented; see ascend_opt/simnpu/triton_cann.py"
            )

        return call

    # Kernels name these functions when they are imported, so a missing one may fail only if called.
    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


def _block(triton: ModuleType, data: Any, scalar_type: Any) -> Any:
    """Make a Triton tensor of a NumPy array; one of no dimensions becomes a scalar."""
    from triton.runtime.interpreter import TensorHandle

    tl = triton.language
    if data.ndim == 0:
        return tl.core.tensor(TensorHandle(data.reshape(1), scalar_type), scalar_type)
    block_type = tl.block_type(scalar_type, list(data.shape))
    return tl.core.tensor(TensorHandle(data, scalar_type), block_type)


def _libdevice(triton: ModuleType) -> ModuleType:
    """Build the module of mathematical functions, for float32 and float16 tensors."""
    module = _module("libdevice", "Mathematical functions, element by element.")

    def elementwise(name: str, function: Callable[..., Any], predicate: bool) -> Callable[..., Any]:
        def call(x: Any) -> Any:
            data = x.handle.data
            # bfloat16 is kept as uint16, on whose bits any function would give nonsense.
            if not np.issubdtype(data.dtype, np.floating):
                raise NotImplementedError(
                    f"simnpu: libdevice.{name} of a {x.dtype} tensor; cast it to float32 first"
                )
            result = np.asarray(function(data))
            scalar_type = triton.language.int1 if predicate else x.type.scalar
            if not x.type.is_block():
                result = result.reshape(())
            return _block(triton, result, scalar_type)

        call.__name__ = name
        return call

    for name, function in _FLOAT_FUNCTIONS.items():
        setattr(module, name, elementwise(name, function, predicate=False))
    for name, function in _PREDICATES.items():
        setattr(module, name, elementwise(name, function, predicate=True))
    return module


def _extension(triton: ModuleType) -> ModuleType:
    """Build the module of block access: extract_slice, insert_slice, get_element."""
    module = _module("extension", "Access to parts of a block.")

    def value(number: Any) -> int:
        """Read an index that may be an int, a constexpr or a scalar tensor."""
        if hasattr(number, "handle"):
            return int(number.handle.data.item())
        return int(getattr(number, "value", number))

    def box(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
        numbers = [
            (value(o), value(n), value(s)) for o, n, s in zip(offsets, sizes, strides, strict=True)
        ]
        return tuple(slice(o, o + (n - 1) * s + 1, s) for o, n, s in numbers)

    def extract_slice(full: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        part = full.handle.data[box(offsets, sizes, strides)].copy()
        return _block(triton, part, full.type.scalar)

    def insert_slice(full: Any, sub: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        data = full.handle.data.copy()
        data[box(offsets, sizes, strides)] = sub.handle.data
        return _block(triton, data, full.type.scalar)

    def get_element(src: Any, indice: Any) -> Any:
        element = src.handle.data[tuple(value(i) for i in indice)]
        return _block(triton, np.asarray(element), src.type.scalar)

    for function in (extract_slice, insert_slice, get_element):
        setattr(module, function.__name__, function)
    return module
