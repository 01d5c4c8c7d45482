"""A tiny random Qwen3 (or Qwen2) with a one-character tokenizer, made on the spot.

Run as ``python tests/npu/tiny_model.py DIRECTORY [qwen3|qwen2] [float32|bfloat16]``.
"""

import json
import os
import sys
from pathlib import Path

VOCABULARY = 512
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 768, 8, 4, 32


def make(directory: Path, kind: str = "qwen3", dtype: str = "float32") -> Path:
    """Write config, weights and tokenizer; the same bytes on every call. Returns ``directory``."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    torch_dtype = getattr(torch, dtype)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(torch_dtype)

    def norm(size: int) -> torch.Tensor:
        return (1 + torch.randn(size, generator=generator) * 0.1).to(torch_dtype)

    weights = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN) * 10,
        "model.norm.weight": norm(HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (query, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, query),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }.items():
            weights[f"{at}{name}.weight"] = weight(*shape)
            if kind == "qwen2" and name[10] in "qkv" and name.startswith("self_attn"):
                weights[f"{at}{name}.bias"] = weight(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = norm(HIDDEN)
        if kind == "qwen3":
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                weights[f"{at}{name}.weight"] = norm(HEAD_DIM)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    config = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    characters = {chr(i) if 32 <= i < 127 else f"<{i}>": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<0>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": characters,
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<1>", "unk_token": "<0>"}
        )
    )
    return directory


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), *sys.argv[2:]))
