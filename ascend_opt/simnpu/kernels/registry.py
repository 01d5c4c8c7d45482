"""Where kernels and shape functions are registered by operator name.

The modules of this package fill the tables below when they are imported. Binding them to PyTorch's
dispatcher, and turning npu tensors into the CPU tensors that they take, is not done here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

KERNELS: dict[str, Callable[..., Any]] = {}
"""Operator name (``npu::npu_rms_norm``, ``npu::npu_slice.out``) to its kernel over CPU tensors."""

META: dict[str, Callable[..., Any]] = {}
"""Operator name to its shape function, for operators that come without a Meta kernel."""


def kernel(*names: str) -> Callable[[Function], Function]:
    """Register a function as the kernel of one or more operators.

    Args:
        names: ``namespace::operator``, with ``.overload`` unless it is the default overload.

    Returns:
        A decorator that gives the function back unchanged.

    Raises:
        ValueError: If a name has a kernel already.
    """
    return _register(KERNELS, names)


def meta(*names: str) -> Callable[[Function], Function]:
    """Register a function as the shape function of one or more operators; see :func:`kernel`."""
    return _register(META, names)


def unsupported(op: str, **arguments: Any) -> None:
    """Refuse arguments that a kernel does not implement.

    Args:
        op: The operator's name, for the message.
        arguments: The arguments that have to be left at ``None``, ``False`` or 0, as passed.

    Raises:
        NotImplementedError: If any of them is set; it names the operator and the argument.
    """
    for name, value in arguments.items():
        # A tensor has no truth value, so test what the defaults are rather than for truth.
        if value is None or (isinstance(value, (bool, int)) and not value):
            continue
        raise NotImplementedError(
            f"simnpu: {op} got {name}={_describe(value)}, which the simulated kernel does not "
            f"implement; call it without {name}, or add support in ascend_opt/simnpu/kernels"
        )


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"a {value.dtype} tensor of shape {tuple(shape)}"


def _register(
    table: dict[str, Callable[..., Any]], names: tuple[str, ...]
) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for name in names:
            if name in table:
                raise ValueError(f"{name} is registered twice: by {table[name]} and by {function}")
            table[name] = function
        return function

    return decorate
