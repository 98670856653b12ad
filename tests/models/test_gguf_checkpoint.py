"""GGUF files: the model is the one that they hold, or they are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from bench.engines.gguf_file import write_gguf
from layerskip_models import from_transformers, load_model, load_tokenizer
from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.loading import load_config, load_transformers
from layerskip_models.kernels.check import native_works
from selfspec.cli.main import app
from tiny_llama import full_logits, tiny_llama, tiny_tokenizer

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
