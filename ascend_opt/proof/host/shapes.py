"""A model by its shapes: a config.json and no weights, for engines that compute nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ascend_opt.errors import AscendOptError

DENSE = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
KNOWN: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN3,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "vocab_size": 512,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
}
"""Published shapes of dense Qwen models, and of the demo's, by name."""


class ShapesError(AscendOptError, ValueError):
    """These are no shapes of a dense Qwen model."""


def write_shapes(shapes: str, directory: Path) -> Path:
    """Write a checkpoint's directory that has a configuration and nothing else.

    Args:
        shapes: A name of `KNOWN`, a config.json, or a directory with one.
        directory: Where to; made if it is missing.

    Returns:
        The directory.

    Raises:
        ShapesError: Neither, or the configuration is not that of a dense Qwen2 or Qwen3.
    """
    config = KNOWN.get(shapes) or _read(shapes)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return directory


def _read(shapes: str) -> dict[str, Any]:
    path = Path(shapes)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ShapesError(
            f"--shapes {shapes}: {error.strerror}: {path}; expected {', '.join(KNOWN)}, or the "
            "config.json of a dense Qwen2 or Qwen3"
        ) from None
    except ValueError as error:
        raise ShapesError(f"--shapes {path}: not JSON: {error}") from None
    found = config.get("architectures") if isinstance(config, dict) else None
    if not found or not set(found) <= set(DENSE):
        raise ShapesError(
            f"--shapes {path}: architectures is {json.dumps(found)}, expected one of "
            f"{', '.join(DENSE)}: only dense models have kernels on the simulated device"
        )
    made: dict[str, Any] = config
    return made
