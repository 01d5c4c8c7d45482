"""Puts the simulated device's kernels behind torch_npu's operators."""

import importlib.util
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from ascend_opt.simnpu.launch import DISPATCH_VARIABLE, SCHEMAS_VARIABLE

PLACEHOLDERS: dict[str, int] = {}
"""Operators without a kernel that gave zeros to a compiler tracing its patterns, and how often."""

# Views, allocation and the like: torch_npu's own kernels do these on the host side and are kept.
_KEPT_ATEN = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty_strided",
        "as_strided",
        "as_strided_",
        "view",
        "_reshape_alias",
        "squeeze",
        "unsqueeze",
        "set_",
        "resize_",
        "resize_as_",
        "record_stream",
        "is_pinned",
        "_pin_memory",
        "pin_memory",
        "is_set_to",
        "_local_scalar_dense",
        "copy_",
        "_to_copy",
        "_copy_from_and_resize",
        "contiguous",
        "view_as_real",
        "view_as_complex",
        "unfold",
        "_lazy_clone",
        "_to_sparse",
        "empty_with_format",
        "unsafe_empty_with_format",
        "empty_with_swapped_memory",
        "matmul_backward",
        "_fused_sdp_choice",
    ]
)
# Device operators that reach the driver by themselves or only ask about a tensor.
_KEPT_NPU = frozenset(
    ["npu_prefetch", "get_npu_format", "get_storage_size", "npu_change_data_ptr", "copy_memory_"]
)
# Where an operator may be called on real tensors while nothing is being computed.
_TRACERS = ("torch/fx/experimental/proxy_tensor.py", "torch/_inductor/pattern_matcher.py")

_libraries: list[Any] = []


class MissingKernelError(NotImplementedError):
    """The model reached an operator that the simulated device has no kernel for."""


def library() -> ModuleType:
    """Return the operator library, which ``simnpu setup`` built."""
    name = "simnpu_dispatch"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, os.environ[DISPATCH_VARIABLE])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def install() -> None:
    """Replace the kernels of every aten, npu and atb operator of torch_npu. Idempotent."""
    import torch

    if _libraries:
        return
    from ascend_opt.simnpu.kernels import KERNELS, META

    dispatch = library()
    dispatch.install()
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    dispatch.bind(
        [op for op in registered if op.startswith("aten::") and _base(op) not in _KEPT_ATEN]
    )
    # torchvision's registry wheel is built for CUDA and its operators do not load here; its Python
    # part, which vLLM imports, only needs them declared.
    vision = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        vision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(vision)

    names = [op for op in registered if op.split("::")[0] in ("npu", "atb")]
    ours = [name for name in KERNELS if name.split("::")[0] in ("npu", "atb")]
    for name in ours:
        dispatch.add_kernel(name, KERNELS[name])
    dispatch.bind([name for name in ours if _base(name) not in _KEPT_NPU])
    _add_shapes([name for name in META if name.split("::")[0] in ("npu", "atb")], META)
    lacking = [op for op in names if op not in KERNELS and _base(op) not in _KEPT_NPU]
    dispatch.bind_missing(lacking, on_missing)


def define_c_ascend() -> None:
    """Define ``torch.ops._C_ascend``, which the compiled extension of vllm-ascend would define."""
    import torch

    from ascend_opt.simnpu.kernels import KERNELS, META

    dispatch = library()
    definitions = torch.library.Library("_C_ascend", "FRAGMENT")
    _libraries.append(definitions)
    with open(os.environ[SCHEMAS_VARIABLE]) as file:
        schemas = file.read().splitlines()
    names = []
    for schema in schemas:
        try:
            definitions.define(schema)
        except RuntimeError as error:
            print(f"simnpu: schema not understood: {schema[:60]}: {error}", file=sys.stderr)
            continue
        names.append("_C_ascend::" + schema.partition("(")[0].strip())
    ours = [name for name in names if name in KERNELS]
    for name in ours:
        dispatch.add_kernel(name, KERNELS[name])
    dispatch.bind(ours)
    _add_shapes([name for name in names if name in META], META)
    dispatch.bind_missing([name for name in names if name not in KERNELS], on_missing)
    if "_C_ascend::get_npu_view_from_cpu_tensor" in names:
        # Ascend has no unified addressing unless asked for: vllm-ascend probes this and steps back.
        definitions.impl("get_npu_view_from_cpu_tensor", lambda tensor: None, "CPU")


def on_missing(name: str) -> None:
    """Refuse an operator without a kernel, unless a compiler is tracing patterns just now.

    Raises:
        MissingKernelError: If the model is running.
    """
    if _is_tracing(sys._getframe()):
        PLACEHOLDERS[name] = PLACEHOLDERS.get(name, 0) + 1
        return
    raise MissingKernelError(
        f"simnpu has no kernel for {name}, which the model reached. Dense Qwen2 and Qwen3 "
        f"in bf16 and fp32 are supported; for more, add a kernel in ascend_opt/simnpu/kernels"
    )


def launch(name: str, work: Callable[[], None]) -> None:
    """Queue a Python callable on the current stream, as a kernel of that name."""
    library().launch(name, work)


def _base(name: str) -> str:
    return name.split("::")[1].split(".")[0]


def _is_tracing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith(_TRACERS):
            return True
        frame = frame.f_back
    return False


def _add_shapes(names: list[str], shapes: dict[str, Callable[..., Any]]) -> None:
    import torch

    for name in names:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            continue
        namespace, _, op = name.partition("::")
        meta = torch.library.Library(namespace, "IMPL", "Meta")
        meta.impl(op, shapes[name])
        _libraries.append(meta)
