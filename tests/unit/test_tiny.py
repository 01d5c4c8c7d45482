import hashlib
import json
import subprocess
import sys

import pytest

from ascend_opt.tiny import VOCABULARY, write_tiny_model


def digests(directory):
    """Return the hash of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_same_arguments_give_the_same_bytes(tmp_path, family):
    """Two checkpoints from equal arguments are equal byte for byte; another seed is not."""
    first = digests(write_tiny_model(tmp_path / "a", family=family, layers=1))
    second = digests(write_tiny_model(tmp_path / "b", family=family, layers=1))
    other = digests(write_tiny_model(tmp_path / "c", family=family, layers=1, seed=1))

    assert second == first
    assert [name for name in first if other[name] != first[name]] == ["model.safetensors"]


def test_bytes_are_those_of_the_first_release(tmp_path):
    """The weights never change between releases: figures quoted in the documentation hold."""
    expected = "3f3fd66ef8953a42921a39f46729db8e55a4c6c9eb4fbc650e41247194867321"
    assert digests(write_tiny_model(tmp_path, layers=1))["model.safetensors"] == expected


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    """Making the checkpoint leaves the process free of torch: it can run before a driver."""
    code = (
        "import sys; from ascend_opt.tiny import write_tiny_model; "
        f"write_tiny_model({str(tmp_path)!r}, layers=1); "
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (printed.stdout.strip(), printed.returncode) == ("[]", 0), printed.stderr


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_tensor_of_the_model_is_there(tmp_path, family):
    """The file is read by safetensors, and each layer brings the same names with its own number."""
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    path = write_tiny_model(tmp_path, family=family, layers=2)
    with safetensors.safe_open(path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        embedding = file.get_tensor("model.embed_tokens.weight")
    layers = [{n.split(".", 3)[3] for n in names if f"layers.{i}." in n} for i in (0, 1)]

    assert layers[0] == layers[1]
    assert ("self_attn.q_norm.weight" in layers[0]) == (family == "qwen3")
    assert ("self_attn.q_proj.bias" in layers[0]) == (family == "qwen2")
    assert str(embedding.dtype) == "torch.bfloat16"
    assert embedding.float().std().item() == pytest.approx(0.3, rel=0.05)


def test_text_survives_the_tokenizer(tmp_path):
    """Printable ASCII, tabs and newlines are one token each and come back unchanged."""
    tokenizers = pytest.importorskip("tokenizers")
    path = write_tiny_model(tmp_path, layers=1)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "\t\n" + "".join(map(chr, range(32, 127)))

    assert tokenizer.encode(text).ids == [ord(character) for character in text]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("é").ids == [0]
    assert tokenizer.get_vocab_size() == VOCABULARY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"family": "llama"}, "'llama': expected one of qwen2, qwen3"), ({"layers": 0}, "found 0")],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    """What was found and what was expected are in the message, and nothing is written."""
    with pytest.raises(ValueError, match=message):
        write_tiny_model(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_configuration_is_that_of_a_dense_model(tmp_path):
    """The configuration names the family's own class and no experts."""
    config = json.loads((write_tiny_model(tmp_path, family="qwen2") / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert not [key for key in config if "expert" in key]
