import json
from pathlib import Path

import pytest

from ascend_opt.proof.host.shapes import KNOWN, ShapesError, write_shapes


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_known_model_is_a_configuration_and_nothing_else(name: str, tmp_path: Path) -> None:
    """No weights, no tokenizer; heads and widths fit together."""
    directory = write_shapes(name, tmp_path / "made")
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    config = json.loads((directory / "config.json").read_text())
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("directory", [True, False], ids=["directory", "file"])
def test_shapes_of_one_s_own(directory: bool, tmp_path: Path) -> None:
    """A checkpoint's directory or its config.json, unchanged."""
    mine = {**KNOWN["tiny"], "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(mine))
    given = tmp_path if directory else tmp_path / "config.json"
    made = write_shapes(str(given), tmp_path / "made")
    assert json.loads((made / "config.json").read_text()) == mine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory: .*; expected tiny, qwen3-8b, qwen3-32b, or the config"),
        ("{", "not JSON"),
        ("[]", "architectures is null, expected one of Qwen2ForCausalLM"),
        ('{"architectures": ["MixtralForCausalLM"]}', 'architectures is ."MixtralForCausalLM".'),
    ],
    ids=["missing", "broken", "list", "sparse"],
)
def test_what_are_no_shapes_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    """The error names the file, what was found and what would do; nothing is written."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ShapesError, match=message):
        write_shapes(str(tmp_path / "config.json"), tmp_path / "made")
    assert not (tmp_path / "made").exists()
