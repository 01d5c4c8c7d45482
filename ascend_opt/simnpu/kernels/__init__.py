"""What the simulated device computes: npu, atb and _C_ascend operators over CPU tensors.

Each kernel takes exactly its operator's schema arguments as CPU tensors. It returns fresh tensors,
or mutates its arguments where the schema's alias annotations say so. It knows nothing of devices,
streams or torch_npu, so it runs, and is tested, with a plain CPU build of torch.

Covered is what dense Qwen2 and Qwen3 models reach through vllm-ascend, in float32, bfloat16 and
float16. Quantised inputs, mixture-of-experts and MLA operators are not; a call to one of them, or
with an argument that is not implemented, raises ``NotImplementedError`` naming it.
"""

from ascend_opt.simnpu.kernels import (
    activation,
    attention,
    attention_v2,
    cache,
    indexing,
    layout,
    linear,
    norm,
    paged_attention,
    rotary,
    sampling,
)
from ascend_opt.simnpu.kernels.registry import KERNELS, META

__all__ = [
    "KERNELS",
    "META",
    "activation",
    "attention",
    "attention_v2",
    "cache",
    "indexing",
    "layout",
    "linear",
    "norm",
    "paged_attention",
    "rotary",
    "sampling",
]
