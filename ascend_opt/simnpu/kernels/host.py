"""Operators of _C_ascend that ask about the machine or talk to the host."""

from torch import Tensor

from ascend_opt.simnpu.kernels.registry import host_kernel, kernel


@host_kernel("_C_ascend::get_npu_view_from_cpu_tensor")
def get_npu_view_from_cpu_tensor(cpu_tensor: Tensor) -> Tensor | None:
    """``(Tensor cpu_tensor) -> Tensor?``: None, "this device cannot map host memory"."""
    del cpu_tensor
    return None


@host_kernel("_C_ascend::get_physical_device_id")
def get_physical_device_id(user_device_id: int) -> int:
    """``(int user_device_id) -> int``: the same, since no device is hidden."""
    return user_device_id


@host_kernel("_C_ascend::device_print")
def device_print(msg: str) -> None:
    """``(str msg) -> ()``: print a line."""
    print(msg, flush=True)


@kernel("_C_ascend::device_print_tensor")
def device_print_tensor(tensor: Tensor) -> None:
    """``(Tensor tensor) -> ()``: print a tensor's values when the stream gets there."""
    print(tensor, flush=True)
