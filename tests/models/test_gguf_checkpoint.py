"""GGUF files: the model is the one that they hold and describe, or they are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import gguf_models
from bench.engines.gguf_file import write_gguf
from fuzz_models import looped_options, random_model, small_config
from layerskip_models import from_transformers, load_model, load_tokenizer
from layerskip_models.checkpoints import gguf_metadata
from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.loading import load_config, load_transformers
from layerskip_models.kernels.check import native_works
from looped_models import LOOPED
from selfspec.cli.main import app
from tiny_llama import full_logits, lean_logits, tiny_llama, tiny_tokenizer

CPU = torch.device("cpu")
BLOCKS = ("Q4_K_M", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL")


def small(**options: Any) -> LlamaForCausalLM:
    """Rows that Q8_0 holds."""
    return tiny_llama(hidden_size=32, heads=2, kv_heads=1, head_dim=16, intermediate_size=64, seed=4, **options)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3"])
def test_a_gguf_file_gives_the_models_logits(rope: str, tmp_path: Path) -> None:
    llama_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama_3["original_max_position_embeddings"] = 8192
    model = small(rope=llama_3 if rope == "llama3" else rope, max_position_embeddings=64 if rope != "llama3" else 16384)
    write_gguf(model, tmp_path / "model.gguf", "F32")
    config = load_config(tmp_path)
    assert config.rope_parameters["rope_type"] == rope and config.eos_token_id is None
    found = load_transformers(tmp_path / "model.gguf", dtype="float32", device="cpu")
    text = [(7 * i + 3) % 24 for i in range(60)]
    torch.testing.assert_close(full_logits(found, text), full_logits(model, text), rtol=1e-4, atol=1e-4)
    assert not hasattr(found.config, "quantization_config")
    found.save_pretrained(tmp_path / "saved")
    assert load_model(tmp_path / "saved").num_layers == 4


def test_a_gguf_file_of_8_bits_is_int8_and_of_floats_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No layout holds rows of 32 numbers, so that they are rounded, which a line says where nobody asked for it."""
    for kind in ("Q8_0", "F16"):
        write_gguf(small(), tmp_path / f"{kind}.gguf", kind)
    eight, full = (load_model(tmp_path / f"{kind}.gguf", device="cpu") for kind in ("Q8_0", "F16"))
    same = load_model(tmp_path / "F16.gguf", dtype="int8", device="cpu")
    (said,) = caplog.messages
    assert said.startswith("25 matrices of Q8_0.gguf are rounded to 8 bits with one scale per output (25 Q8_0): ")
    assert eight.layer_bytes <= same.layer_bytes <= full.layer_bytes
    if native_works(CPU, torch.float32):  # operators need a few bytes more for weights that were rounded here
        assert eight.layer_bytes == same.layer_bytes


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        *((kind, False) for kind in BLOCKS),
        ("Q4_K_M", True),  # whose embedding, and so its head, is of another kind than most layers
        ("Q4_0", True),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in BLOCKS[2:]),
    ],
)
def test_blocks_of_a_gguf_file_keep_their_numbers(kind: str, tied: bool, tmp_path: Path) -> None:
    """Those that transformers reads, in layers, head and embedding, of which none is there as floats."""
    shape = {"hidden_size": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate_size": 512}
    num_layers = 4 if kind == "Q4_K_M" else 2  # of that kind the layers differ
    model = tiny_llama(**shape, num_layers=num_layers, seed=4, late_scale=0.6, tie_word_embeddings=tied)
    write_gguf(model, tmp_path / "model.gguf", kind)
    meant: Any = load_transformers(tmp_path, dtype="float32", device="cpu")
    found: Any = load_model(tmp_path, device="cpu")
    full: Any = from_transformers(meant, layout="native" if native_works(CPU, torch.float32) else "plain")
    for ours, theirs in zip(found.layers, full.layers):
        for name in ("output", "down") if full.kernels is None else ("qkv", "output", "gate_up", "down"):
            assert torch.equal(getattr(ours, name).weight, getattr(theirs, name).weight)
    assert torch.equal(found.embed(torch.arange(24)), full.embed(torch.arange(24)))
    assert torch.equal(found.head.weight, meant.lm_head.weight)
    assert (found._embedding is found.head) is tied and found._embedding.num_bytes <= found.head.num_bytes
    assert found.head_bytes < 1.1 * 32 * 256 + 4 * 256  # 24 outputs, and eight of zeros; and a norm


def test_generate_and_verify_a_gguf_file(tmp_path: Path) -> None:
    """With the tokenizer that lies beside it, by the file's name and by the folder's."""
    write_gguf(small(max_position_embeddings=256), tmp_path / "tiny.gguf", "Q8_0")
    tiny_tokenizer().save_pretrained(tmp_path)
    run = CliRunner()
    for name in (tmp_path / "tiny.gguf", tmp_path):
        result = run.invoke(app, ["generate", "abc", "--model", str(name), "--max-new-tokens", "8", "--json"])
        assert result.exit_code == 0, result.output
        assert len(json.loads(result.stdout)["token_ids"]) == 8
    (tmp_path / "a.txt").write_text("abc abd abe")
    options = ["--policy", "ls:2-3", "--draws", "0", "--max-new-tokens", "8", "--file", str(tmp_path / "a.txt")]
    result = run.invoke(app, ["verify", str(tmp_path / "tiny.gguf"), *options])
    assert result.exit_code == 0, result.output


def test_gguf_files_that_would_become_another_model(tmp_path: Path) -> None:
    cases = {"biases": small(attention_bias=True), "yarn": small(rope="yarn")}
    messages = {"biases": "not the model's.*attn_.*bias", "yarn": "scales rotary positions"}
    for name, model in cases.items():
        write_gguf(model, tmp_path / f"{name}.gguf", "F32")
        with pytest.raises(ValueError, match=f"(?s){messages[name]}.*load the checkpoint that the file was made from"):
            load_model(tmp_path / f"{name}.gguf")
    with pytest.raises(ValueError, match="holds 2 GGUF files: name one"):
        load_model(tmp_path)
    part = tmp_path / "big-00001-of-00002.gguf"
    shutil.copy(tmp_path / "yarn.gguf", part)
    with pytest.raises(ValueError, match="join them first"):
        load_model(part)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "yarn.gguf").read_bytes()[:400])
    with pytest.raises(OSError, match="incomplete or damaged"):
        load_model(tmp_path / "cut.gguf")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json of the original"):
        load_tokenizer(tmp_path / "yarn.gguf")


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_damaged_numbers_of_five_bits(kind: str, tmp_path: Path) -> None:
    """The file ends within them, a scale (or an offset) is NaN, a row is no whole number of blocks."""
    path, name = tmp_path / "model.gguf", b"blk.1.ffn_up.weight"
    write_gguf(tiny_llama(hidden_size=64, heads=2, head_dim=32, intermediate_size=64), path, kind)
    whole, reader = path.read_bytes(), GgufReader(path)
    (tensor,) = (one for one in reader.tensors if one.name == name.decode())
    second, width = tensor.begin + tensor.row_bytes + 2 * (kind == "Q5_1"), whole.index(name) + len(name) + 4
    for data, error, message in (
        (whole[: tensor.begin + 100], OSError, r"model.gguf is incomplete or damaged \(its tensor .* beyond the end"),
        (whole[:second] + b"\x01\x7e" + whole[second + 2 :], ValueError, r"model.gguf.*layers.1.mlp.up_proj.weight"),
        (whole[:width] + b"\x50" + whole[width + 1 :], OSError, r"shape \[80, 64\], and blocks of 32 inputs"),
    ):
        path.write_bytes(data)
        with pytest.raises(error, match=message):
            load_model(path, device="cpu")


TEXT = [(7 * i * i + 3) % 24 for i in range(40)]
Change = dict[str, Any]


def model_of(kind: str, **options: Any) -> PreTrainedModel:
    head_dim, kv_heads = options.pop("head_dim", 16), options.pop("num_key_value_heads", 1)
    options = (looped_options(kind, 2) if kind in LOOPED else {}) | options
    config = small_config(kind, 32, 64, 2, 2, kv_heads, vocab_size=24, rms_norm_eps=1e-3, **options)
    if head_dim != 16 or kind in ("qwen3", *LOOPED):
        config.head_dim = head_dim
    return random_model(config, late_scale=0.5, sharpness=2.0, seed=3).float()


def write(folder: Path, model: PreTrainedModel, kind: str = "F32", **changes: Any) -> Path:
    """changes: metadata, with "__" for dots; None leaves a key out."""
    keys = gguf_models.metadata(model.config)
    for name, value in changes.items():
        keys[name.replace("__", ".")] = value
    path = folder / "model.gguf"
    kept = {name: value for name, value in keys.items() if value is not None}
    gguf_models.write(path, model.config.model_type, kept, gguf_models.tensors(model, kind))
    return path


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
READ: dict[str, tuple[str, Change, Change]] = {
    "llama": ("llama", {}, {}),
    "a tied head": ("llama", {"tie_word_embeddings": True}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "phi3": ("phi3", {}, {}),
    "a window": ("phi3", {"sliding_window": 4}, {}),
    "a window of none": ("phi3", {}, {"attention__sliding_window": 0}),
    "a window that the context does not reach": ("llama", {}, {"attention__sliding_window": 64}),
    "part of a head rotated": ("phi3", {"rope_parameters": PARTIAL}, {}),
    "another base": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {}),
    "no base": ("qwen3", {}, {"rope__freq_base": None}),
    "as many key-value heads": ("qwen2", {"num_key_value_heads": 2}, {"attention__head_count_kv": None}),
    "heads wider than the hidden state": ("qwen3", {"head_dim": 24}, {}),
    "wide heads of a Qwen2": ("qwen2", {"head_dim": 24}, {}),
    "no sizes of heads": ("llama", {}, {"attention__key_length": None, "attention__value_length": None}),
    "no rotated numbers": ("qwen2", {}, {"rope__dimension_count": None}),
    "ouro": ("ouro", looped_options("ouro", 3), {}),
    "nanbeige": ("nanbeige", looped_options("nanbeige", 2), {}),
    "no norm between loops": ("nanbeige", looped_options("nanbeige", 3, skip_norm=True), {"skip_loop_final_norm": True}),
    "no word of loops": ("nanbeige", looped_options("nanbeige", 1), {"num_loops": None, "skip_loop_final_norm": None}),
    "what is switched off": ("llama", {}, {"expert_count": 0, "logit_scale": 1.0, "attention__causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options, changes = READ[name]
    model = model_of(kind, **options)
    found = load_model(write(tmp_path, model, **changes), dtype="float32", device="cpu", layout="plain")
    torch.testing.assert_close(lean_logits(found, TEXT), full_logits(model, TEXT), rtol=1e-4, atol=1e-4)
    plain = load_config(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_metadata, "known_config", lambda family, said: None)
    assert kind in LOOPED or plain.to_dict() == load_config(tmp_path / "model.gguf").to_dict()


REFUSED: dict[str, tuple[str, Change, str]] = {
    "a window of a Llama": ("llama", {"attention__sliding_window": 4}, "sliding window of 4 positions"),
    "a window of a Qwen2": ("qwen2", {"attention__sliding_window": 4}, "which is read for Phi-3 only"),
    "a window in some layers": ("phi3", {"attention__sliding_window_pattern": [True, False]}, "sliding_window_pattern"),
    "a factor on logits": ("llama", {"logit_scale": 0.5}, r"llama\.logit_scale = 0\.5"),
    "attention to both sides": ("qwen2", {"attention__causal": False}, r"attention\.causal = False"),
    "values of another size": ("llama", {"attention__value_length": 8}, "values of another size"),
    "part of a Llama's head rotated": ("llama", {"rope__dimension_count": 8}, "rotates 8 of 16 numbers"),
    "half of a pair rotated": ("phi3", {"rope__dimension_count": 7}, "rotates 7 numbers of a head"),
    "part of a Qwen3's": ("qwen3", {"rope__dimension_count": 8}, "rotates 8 of 16 numbers"),
    "yarn": ("qwen2", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, r"not read here \(yarn\)"),
    "a factor on attention": ("qwen2", {"rope__scaling__attn_factor": 1.2}, "scales rotary positions"),
    "loops of a Llama": ("llama", {"num_loops": 2}, "says llama.num_loops = 2, which is not read"),
    "loops of an Ouro without norms": ("ouro", {"skip_loop_final_norm": True}, "skip_loop_final_norm = True"),
    "no loops of an Ouro": ("ouro", {"num_loops": None}, r"lacks ouro\.num_loops"),
    "loops of text": ("ouro", {"num_loops": "2"}, r"ouro\.num_loops = '2'"),
    "no epsilon": ("qwen2", {"attention__layer_norm_rms_epsilon": None}, "lacks qwen2.attention.layer_norm_rms_epsilon"),
    "a width that heads do not divide": ("llama", {"embedding_length": 33}, "describes a model that cannot be"),
    "a base that is not finite": ("llama", {"rope__freq_base": float("inf")}, "above 0 is meant"),
    "no key-value heads": ("llama", {"attention__head_count_kv": None}, r"lacks llama\.attention\.head_count_kv"),
    "heads by layer": ("llama", {"attention__head_count_kv": [1, 2]}, "another llama.attention.head_count_kv in each layer"),
    "heads of text": ("llama", {"attention__head_count": "2"}, "head_count = '2'"),
    "fewer layers than tensors": ("llama", {"block_count": 1}, "tensors that are not the model"),
    "more layers than any file has": ("llama", {"block_count": 2**32 - 1}, "block_count = 4294967295, and it has"),
    "a head larger than any": ("qwen2", {"attention__key_length": 2**32 - 2}, "heads of 4294967294 numbers"),
    "a width of one head": ("qwen2", {"embedding_length": 2**32 - 2, "attention__key_length": None}, "heads of 2147483647"),
    "more layers": ("llama", {"block_count": 3}, "lacks tensors of the model"),
    "another width": ("qwen2", {"feed_forward_length": 32}, r"has shape \[64, 32\], and what the file says"),
    "a window of text": ("phi3", {"attention__sliding_window": "4"}, "a number is meant"),
    "an end of text that is no token": ("llama", {"tokenizer__ggml__eos_token_id": 1.5}, "a token's number is meant"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    kind, changes, message = REFUSED[name]
    path = write(tmp_path, model_of(kind), **changes)
    with pytest.raises(ValueError, match=f"model.gguf.*{message}.*load the checkpoint that the file was made from"):
        load_model(path)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3moe"])
def test_of_a_model_that_no_checkpoint_helps_with_none_is_advised(kind: str, tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "model.gguf", kind, {}, {})
    with pytest.raises(ValueError, match=f"is a '{kind}' model, which would need .*; GGUF files of") as caught:
        load_model(tmp_path / "model.gguf")
    assert "load the checkpoint" not in str(caught.value)
    path = write(tmp_path, model_of("llama"), expert_count=8)
    with pytest.raises(ValueError, match=r"has 8 experts, which would need a mixture of experts in place of the MLP$"):
        load_model(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_our_reader_finds_what_ggufs_own_finds(kind: str, tmp_path: Path) -> None:
    texts = {"general__tags": ["a", "", "日本"], "general__numbers": [1.5, -2.0], "general__flags": [True, False]}
    path = write(tmp_path, model_of("llama"), kind, general__name="Ünï", general__count=-3, **texts)
    ours, theirs = GgufReader(path), gguf.GGUFReader(path)
    assert ours.keys == [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert {key: ours.value(key) for key in ours.keys} == {key: theirs.fields[key].contents() for key in ours.keys}
    lengths = [ours.length(key) for key in ("general.tags", "general.numbers", "general.name", "other")]
    assert lengths == [3, 2, None, None]
    assert len(ours.tensors) == len(theirs.tensors) > 10
    for found, meant in zip(ours.tensors, theirs.tensors):
        assert (found.name, found.tensor_type) == (meant.name, meant.tensor_type)
        assert [*found.shape] == meant.shape.tolist()
        data = ours.file.tensor(found.begin, torch.uint8, (meant.data.nbytes,))
        assert np.array_equal(data.numpy(), np.array(meant.data).view(np.uint8).reshape(-1))


def test_whatever_ends_a_text_or_a_turn_ends_an_answer(tmp_path: Path) -> None:
    path = write(tmp_path, model_of("llama"), tokenizer__ggml__eos_token_id=0, tokenizer__ggml__eot_token_id=5)
    assert load_model(path, device="cpu").generation_config.eos_token_id == [0, 5]


def put(place: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + value + data[place + len(value) :]


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (put(0, b"XXXX"), "does not begin as a GGUF file"),
    "order": (put(4, b"\0\0\0\3"), "little-endian"),
    "version": (put(4, b"\1\0\0\0"), "its version is 1"),
    "end": (lambda data: data[:-8], "reaches beyond the end"),
    "header": (lambda data: data[: len(data) // 9], "longer than the file|no room|beyond the end"),
    "empty": (lambda data: b"", "no room"),
    "a key twice": (lambda data: data.replace(b"general.type", b"general.name", 1), "general.name twice"),
    "tensors": (put(8, b"\xff" * 8), ""),
    "keys": (put(16, b"\xff\xff\xff\xff\0\0\0\0"), ""),
    "a key's length": (put(24, b"\xff\xff\xff\xff\0\0\0\0"), ""),
    "an array": (put(52, b"\x09"), ""),
    "a type that is none": (put(52, b"\x63"), ""),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(name: str, tmp_path: Path) -> None:
    """A count that is damaged is not believed."""
    change, message = DAMAGED[name]
    path = write(tmp_path, model_of("llama"), general__name="a", general__type="b")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(OSError, match=f"model.gguf is incomplete or damaged .*({message})"):
        load_model(path)
