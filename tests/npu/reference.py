"""Qwen3 in plain PyTorch, one prompt at a time: what greedy tokens have to be.

Usage: ``reference.py MODEL``. It prints the tokens of the workload of engine_program.py.
"""

import json
import sys
from pathlib import Path

import engine_program
import torch
from safetensors.torch import load_file
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu


def normalize(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotate(x: torch.Tensor, start: int, theta: float) -> torch.Tensor:
    """Rotary embedding of [heads, tokens, size], the halves of each head being a pair."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    position = torch.arange(start, start + x.shape[1], dtype=torch.float32)
    angle = position[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def next_token(
    weights: dict[str, torch.Tensor],
    config: dict,
    tokens: list[int],
    past: dict[tuple[int, str], torch.Tensor],
) -> int:
    """Return the token that follows ``tokens``, which follow what ``past`` remembers."""
    epsilon, theta = config["rms_norm_eps"], config["rope_theta"]
    start = past[0, "k"].shape[1] if past else 0
    x = embedding(torch.tensor(tokens), weights["model.embed_tokens.weight"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = normalize(x, weights[f"{at}input_layernorm.weight"], epsilon)
        parts = {}
        for part in "qkv":
            heads = linear(h, weights[f"{at}self_attn.{part}_proj.weight"])
            heads = heads.view(len(tokens), -1, config["head_dim"]).transpose(0, 1)
            if part != "v":
                heads = normalize(heads, weights[f"{at}self_attn.{part}_norm.weight"], epsilon)
                heads = rotate(heads, start, theta)
            if part != "q":
                if start:
                    heads = torch.cat((past[layer, part], heads), dim=1)
                past[layer, part] = heads
            parts[part] = heads[None]
        # The first call has the prompt; every later one has one token, which sees everything.
        mixed = scaled_dot_product_attention(
            parts["q"], parts["k"], parts["v"], is_causal=not start, enable_gqa=True
        )
        x = x + linear(mixed[0].transpose(0, 1).flatten(1), weights[f"{at}self_attn.o_proj.weight"])
        h = normalize(x, weights[f"{at}post_attention_layernorm.weight"], epsilon)
        gate, up = (linear(h, weights[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + linear(silu(gate) * up, weights[f"{at}mlp.down_proj.weight"])
    last = normalize(x[-1], weights["model.norm.weight"], epsilon)
    return int(linear(last, weights["lm_head.weight"]).argmax())


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)  # nothing here is large enough to share
    model = Path(sys.argv[1])
    stored = load_file(model / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in stored.items()}
    config = json.loads((model / "config.json").read_text())
    tokens = {}
    for index in range(len(engine_program.LENGTHS)):
        past: dict[tuple[int, str], torch.Tensor] = {}
        new = list(engine_program.prompt(index)["prompt_token_ids"])
        produced: list[int] = []
        for _ in range(engine_program.NUM_TOKENS):
            produced.append(next_token(weights, config, new, past))
            new = produced[-1:]
        tokens[str(index)] = produced
    print("RESULT " + json.dumps({"tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
