"""What a GGUF file says of its model is in the logits, or the file is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import gguf_models
from fuzz_models import random_model, small_config
from layerskip_models import load_model
from layerskip_models.checkpoints import gguf_metadata
from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.loading import load_config
from tiny_llama import full_logits, lean_logits

TEXT = [(7 * i * i + 3) % 24 for i in range(40)]
Change = dict[str, Any]


def model_of(kind: str, **options: Any) -> PreTrainedModel:
    head_dim, kv_heads = options.pop("head_dim", 16), options.pop("num_key_value_heads", 1)
    config = small_config(kind, 32, 64, 2, 2, kv_heads, vocab_size=24, rms_norm_eps=1e-3, **options)
    if head_dim != 16 or kind == "qwen3":
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
    "what is switched off": ("llama", {}, {"expert_count": 0, "logit_scale": 1.0, "attention__causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options, changes = READ[name]
    model = model_of(kind, **options)
    found = load_model(write(tmp_path, model, **changes), dtype="float32", device="cpu", layout="plain")
    torch.testing.assert_close(lean_logits(found, TEXT), full_logits(model, TEXT), rtol=1e-4, atol=1e-4)
    plain = load_config(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_metadata, "plain_config", lambda family, said: None)
    assert plain.to_dict() == load_config(tmp_path / "model.gguf").to_dict()


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
