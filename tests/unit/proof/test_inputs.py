from pathlib import Path

import pytest

from ascend_opt.proof.model import ModelError, resolve_model
from ascend_opt.proof.prompts import LENGTHS, PromptError, default_prompts, read_prompts


def test_the_default_prompts_have_mixed_lengths_and_one_shared_prefix() -> None:
    """Every documented length is there; only the last two begin at the same place."""
    found = default_prompts()
    assert [prompt["tokens"] for prompt in found] == list(LENGTHS)
    offsets = [prompt["offset"] for prompt in found]
    assert len(set(offsets)) == len(offsets) - 1
    assert offsets[-1] == offsets[-2]


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    """Blank lines are skipped; spaces inside a line are kept."""
    file = tmp_path / "p.txt"
    file.write_text("one  two\n\n  three\n")
    assert read_prompts(str(file)) == ["one  two", "  three"]


def test_a_jsonl_file_may_hold_texts_and_token_ids(tmp_path: Path) -> None:
    """Both of vLLM's names for a prompt are read."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\\nb"}\n{"prompt_token_ids": [1, 2]}\n"c"\n[3]\n')
    assert read_prompts(str(file)) == ["a\nb", [1, 2], "c", [3]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "\n \n", "no prompts"),
        ("p.jsonl", '{"text": "a"}\n', r"p\.jsonl:1: expected"),
        ("p.jsonl", '"a"\n{"prompt"\n', r"p\.jsonl:2: not JSON"),
        ("p.jsonl", '{"prompt_token_ids": [1, true]}\n', "expected"),
    ],
)
def test_a_wrong_prompt_file_names_the_place(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    """An empty file and a line that is no prompt are errors."""
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match=words):
        read_prompts(str(tmp_path / name))


def test_a_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(PromptError, match=r"nothing\.txt: cannot be read: No such file"):
        read_prompts(str(tmp_path / "nothing.txt"))


def test_tiny_is_made_on_the_spot(tmp_path: Path) -> None:
    """`tiny` is a checkpoint, with engine arguments that keep it quick."""
    found = resolve_model("tiny", lambda name: tmp_path / name)
    assert (Path(found.path) / "config.json").is_file()
    assert "--enforce-eager" in found.arguments


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory, no checkpoint in it, or no such name in the cache: the error says which."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    for name in ("nowhere", "./nowhere/model", "Qwen/Qwen3-32B"):
        with pytest.raises(ModelError, match=f"no model at {name}"):
            resolve_model(name, lambda _: tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path), lambda _: tmp_path)


def test_a_cached_hub_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hugging Face name is fine where its snapshot has been downloaded."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--Qwen--Qwen3-0.6B").mkdir()
    assert resolve_model("Qwen/Qwen3-0.6B", lambda _: tmp_path).path == "Qwen/Qwen3-0.6B"
