"""A tiny Qwen checkpoint with random weights, for trying passes without downloading a model.

The demo, the simulated driver and the tests use the same one. It is written file by file, with
neither torch nor transformers, so that making it has no effect on the process that does, and the
same arguments give the same bytes everywhere.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 768, 8, 4, 32, 512
UNKNOWN, END = 0, 1
FAMILIES = ("qwen2", "qwen3")

# With weights of plain variance 1 / inputs the greedy text soon repeats one character. Attention
# that picks few positions, and counts for more than the current token, keeps it moving.
_EMBEDDING, _SHARPNESS, _CONTEXT = 0.3, 6.0, 4.0

# Token i is the ASCII character i where that is printable, a tab or a newline; else `<i>`.
_CHARACTERS = (9, 10, *range(32, 127))

_CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_model(
    directory: str | Path,
    *,
    family: str = "qwen3",
    layers: int = 4,
    seed: int = 0,
    max_position_embeddings: int = 2048,
) -> Path:
    """Write a dense Qwen checkpoint in bfloat16 and its tokenizer (one token a character).

    Greedy tokens are printable characters, depend on the whole prompt and do not settle on one.

    Args:
        directory: Where to; made if it is missing.
        family: `qwen2` or `qwen3`.
        layers: Decoder layers. One is 1.6 MB.
        seed: Other weights for another seed.
        max_position_embeddings: The longest sequence, in tokens.

    Returns:
        The directory.

    Raises:
        ValueError: An unknown family or no layers.
        OSError: The directory cannot be written.
    """
    if family not in FAMILIES:
        raise ValueError(f"model family {family!r}: expected one of {', '.join(FAMILIES)}")
    if layers < 1:
        raise ValueError(f"layers: expected at least 1, found {layers}")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tensors = dict(_weights(family, layers, random.Random(seed)))
    (path / "model.safetensors").write_bytes(_safetensors(tensors))
    texts: dict[str, Any] = {
        "config.json": _config(family, layers, max_position_embeddings),
        "generation_config.json": {"eos_token_id": END, "bos_token_id": END},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": f"<{END}>",
            "unk_token": f"<{UNKNOWN}>",
            "model_max_length": max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT,
        },
    }
    for name, content in texts.items():
        (path / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _config(family: str, layers: int, max_position_embeddings: int) -> dict[str, Any]:
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "bos_token_id": END,
        "eos_token_id": END,
        "torch_dtype": "bfloat16",
    }


def _tokenizer() -> dict[str, Any]:
    vocabulary = {chr(i) if i in _CHARACTERS else f"<{i}>": i for i in range(VOCABULARY)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": f"<{i}>", "special": True, **special} for i in (UNKNOWN, END)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [],
            "unk_token": f"<{UNKNOWN}>",
        },
    }


def _safetensors(tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """Return a safetensors file: length of the header, header, then the tensors in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        shape = list(values.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = [values.tobytes() for values in tensors.values()]
    return b"".join([len(text).to_bytes(8, "little"), text, *data])


def _weights(
    family: str, layers: int, source: random.Random
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield name and values (bfloat16, as uint16) of every tensor, in a fixed order."""
    import numpy as np

    def uniform(*shape: int, deviation: float) -> np.ndarray[Any, Any]:
        # Python's generator gives the same bytes on every machine and release; NumPy's and
        # torch's normal distributions need not.
        raw = np.frombuffer(source.randbytes(2 * int(np.prod(shape))), dtype="<i2")
        scale = np.float32(deviation * math.sqrt(3) / 2**15)
        values: np.ndarray[Any, Any] = (raw.astype(np.float32) * scale).reshape(shape)
        return values

    def linear(outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray[Any, Any]:
        return _bfloat16(uniform(outputs, inputs, deviation=gain / math.sqrt(inputs)))

    def constant(size: int, value: float = 1.0) -> np.ndarray[Any, Any]:
        return _bfloat16(np.full(size, value, np.float32))

    embedding = uniform(VOCABULARY, HIDDEN, deviation=_EMBEDDING)
    yield "model.embed_tokens.weight", _bfloat16(embedding)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            gain = _SHARPNESS if name == "q" and family == "qwen2" else 1.0
            yield f"{prefix}.self_attn.{name}_proj.weight", linear(heads * HEAD_DIM, HIDDEN, gain)
            if family == "qwen2":
                bias = _bfloat16(uniform(heads * HEAD_DIM, deviation=0.1))
                yield f"{prefix}.self_attn.{name}_proj.bias", bias
        yield f"{prefix}.self_attn.o_proj.weight", linear(HIDDEN, HEADS * HEAD_DIM, _CONTEXT)
        if family == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", constant(HEAD_DIM, _SHARPNESS)
            yield f"{prefix}.self_attn.k_norm.weight", constant(HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", linear(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", linear(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", linear(HIDDEN, INTERMEDIATE)
        yield f"{prefix}.input_layernorm.weight", constant(HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", constant(HIDDEN)
    yield "model.norm.weight", constant(HIDDEN)
    # Logits wide apart, so that two correct kernels agree on the greedy token; a token speaks
    # against itself; rows of tokens that are no character are zero, so the text can be read.
    head = uniform(VOCABULARY, HIDDEN, deviation=4.0 / math.sqrt(HIDDEN)) - embedding
    head[[i for i in range(VOCABULARY) if not 32 <= i < 127]] = 0.0
    yield "lm_head.weight", _bfloat16(head)


def _bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return float32 values as bfloat16 (in uint16), rounded to nearest, ties to even."""
    import numpy as np

    bits: np.ndarray[Any, Any] = values.astype("<f4").view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    upper: np.ndarray[Any, Any] = (rounded >> np.uint32(16)).astype("<u2")
    return upper
