"""The tables of kernels, and what they say of arguments they do not take."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascend_opt.simnpu.kernels import KERNELS, META, registry

REPOSITORY = Path(__file__).parents[3]

# What a dense Qwen run was seen to call, on Model Runner V1 and V2, eager and in graphs.
NEEDED = {
    "npu::npu_rms_norm",
    "npu::npu_swiglu",
    "npu::npu_scatter_pa_kv_cache",
    "npu::npu_fused_infer_attention_score",
    "npu::npu_fused_infer_attention_score.out",
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    "npu::npu_mrope",
    "npu::npu_format_cast",
    "npu::npu_reshape.out",
    "npu::npu_top_k_top_p",
    "atb::_npu_rotary_embedding",
    "atb::_npu_paged_attention",
    "atb::_npu_paged_attention_get_workspace",
    "atb::_npu_matmul_add_fp32",
    "_C_ascend::npu_add_rms_norm_bias",
}


def test_tables_hold_what_a_dense_qwen_model_calls():
    """Every operator that was seen to run has a kernel, under its full name."""
    assert KERNELS.keys() >= NEEDED


def test_operators_of_c_ascend_have_shapes():
    """vllm-ascend's own operators come without Meta kernels here, and compilers need them."""
    own = {name for name in KERNELS if name.startswith("_C_ascend::")}
    assert own == META.keys()


def test_a_name_is_registered_once(monkeypatch):
    """A second kernel for a name is a mistake, and both are named."""
    monkeypatch.setattr(registry, "KERNELS", {})

    @registry.kernel("a::b", "a::b.out")
    def first():
        pass

    assert {"a::b": first, "a::b.out": first} == registry.KERNELS
    with pytest.raises(ValueError, match=r"a::b is registered twice.*first.*second"):

        @registry.kernel("a::b")
        def second():
            pass


def test_defaults_are_not_refused():
    """Arguments left at their defaults pass; any other value is named, a tensor by its shape."""
    registry.unsupported("op", tensor=None, flag=False, number=0)
    with pytest.raises(NotImplementedError, match=r"op got x=a torch.int8 tensor of shape \(0,\)"):
        registry.unsupported("op", x=torch.empty(0, dtype=torch.int8))
    with pytest.raises(NotImplementedError, match="op got mode=2,"):
        registry.unsupported("op", flag=False, mode=2)


def test_workspaces_are_bytes():
    """A workspace query gives a one-dimensional uint8 tensor that is not empty."""
    x = torch.zeros(1, 1, 2)
    fused = [
        KERNELS[f"npu::_npu_fused_infer_attention_score{v}_get_max_workspace"](x, x, x, scale=1.0)
        for v in ("", "_v2")
    ]
    paged = KERNELS["atb::_npu_paged_attention_get_workspace"](x, x, x, 1, 1, 1.0, x, x, x)
    for workspace in (*fused, paged):
        assert workspace.dtype == torch.uint8
        assert workspace.dim() == 1
        assert workspace.numel() > 0


def test_importing_kernels_needs_no_torch_npu():
    """The kernels run with a plain CPU build of torch: they import nothing of the Ascend stack."""
    code = """
import sys
for name in ("torch_npu", "vllm", "vllm_ascend", "triton"):
    sys.modules[name] = None  # makes importing it an error
import ascend_opt.simnpu.kernels
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=REPOSITORY)
