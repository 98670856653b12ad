"""A field of config.json is in our logits as in transformers', or it is refused by name."""

from __future__ import annotations

import copy
import json
import pickle
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fuzz_models import random_model, small_config
from layerskip_models import fork_safe, load_model
from layerskip_models.checkpoints.loading import load_config
from layerskip_models.families import IN_TRANSFORMERS, plain_config
from layerskip_models.families.plain_config import PlainConfig
from tiny_llama import full_logits, lean_logits

TEXT = [(7 * i * i + 3) % 24 for i in range(40)]
ALL = tuple(IN_TRANSFORMERS)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0] * 8}


@cache
def saved(kind: str) -> Path:
    own: dict[str, Any] = {"head_dim": 16} if kind == "qwen3" else {}
    config = small_config(kind, 32, 48, 3, 2, 1, vocab_size=24, tie_word_embeddings=False, **own)
    folder = Path(mkdtemp())
    random_model(config, late_scale=0.5, sharpness=1.5, seed=1).float().save_pretrained(folder)
    return folder


def with_fields(kind: str, fields: dict[str, Any], folder: Path) -> Path:
    config = json.loads((saved(kind) / "config.json").read_text())
    if "rope_scaling" in fields:
        config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | fields))
    (folder / "model.safetensors").symlink_to(saved(kind) / "model.safetensors")
    return folder


EQUAL: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (ALL, {"rms_norm_eps": 0.3}),
    (ALL, {"attention_dropout": 0.5}),
    (("llama", "mistral", "qwen2", "olmo2"), {"rope_theta": 100.0, "rope_parameters": None}),
    (("llama", "qwen3"), {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    (("llama", "qwen2"), {"rope_scaling": YARN}),
    (("llama",), {"rope_scaling": {**LLAMA_3, "original_max_position_embeddings": 16}}),
    (("phi3",), {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    (("phi3",), {"rope_scaling": LONG, "original_max_position_embeddings": 48}),
    (("mistral", "phi3"), {"sliding_window": 4}),
    (("qwen2", "qwen3", "smollm3"), {"use_sliding_window": True, "sliding_window": 4, "layer_types": LAYERS}),
    (
        ("qwen2", "qwen3"),
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": None, "max_window_layers": 1},
    ),
    (("smollm3",), {"no_rope_layers": [0, 1, 1]}),
    (("llama",), {"partial_rotary_factor": 0.5, "logit_scale": 0.5, "clip_qkv": 0.1}),  # transformers' Llama reads none
]

REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (ALL, {"is_causal": False}, "is_causal=False"),
    (("llama", "olmo2"), {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (("llama", "qwen3", "olmo2"), {"attention_bias": True}, r"lacks weights.*self_attn\.k_proj\.bias"),
    (("llama", "smollm3"), {"mlp_bias": True}, r"lacks weights.*down_proj\.bias"),
    (("llama", "mistral"), {"head_dim": 8}, r"another shape.*self_attn\.k_proj"),
    (("llama",), {"head_dim": 10**12}, "head_dim=1000000000000"),
    (("llama",), {"head_dim": 0}, "head_dim=0|cannot read the config.json"),
    (("llama", "qwen2"), {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "uses 'dynamic' rope scaling"),
    (("llama",), {"rope_scaling": LONG}, "uses 'longrope' rope scaling"),
    (
        ("llama",),
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "cannot read the config.json.*low_freq_factor",
    ),
    (
        ("llama",),
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "rotate 8 of 16 numbers",
    ),
    (("mistral",), {"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor=0.0"),
    (("llama",), {"rope_theta": 0.0, "rope_parameters": None}, "rope_theta=0.0"),
    (("llama",), {"rope_theta": "a", "rope_parameters": None}, "rope_theta='a'|cannot read the config.json"),
    (("phi3",), {"rope_scaling": {"type": "default", "partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5"),
    (("mistral", "phi3"), {"sliding_window": 0}, "sliding_window=0"),
    (("mistral",), {"sliding_window": 4, "layer_types": LAYERS}, "'ministral' model"),
    (("qwen2",), {"layer_types": ["chunked_attention"] * 3}, "layer_types="),
    (("llama", "qwen2", "smollm3"), {"layer_types": LAYERS, "sliding_window": None}, "no sliding_window"),
    (("smollm3",), {"no_rope_layers": [1, 1]}, "no_rope_layers=|cannot read the config.json|builds no model"),
    (("llama", "qwen2"), {"num_attention_heads": 0}, "num_attention_heads=0|cannot read the config.json"),
    (("llama",), {"num_key_value_heads": 0}, "num_key_value_heads=0"),
    (("llama",), {"num_hidden_layers": "3"}, "cannot read the config.json.*num_hidden_layers"),
    (("llama",), {"num_hidden_layers": 4}, r"lacks weights.*layers\.3\."),
    (("llama", "qwen2"), {"num_hidden_layers": 2**40}, "num_hidden_layers=1099511627776, and at most 16384 are meant"),
    (
        ("qwen2",),
        {"hidden_size": 2**40, "num_attention_heads": 1, "num_key_value_heads": 1},
        "hidden_size=1099511627776, where at most 16384 for each of 1 heads is meant",
    ),
    (("llama",), {"vocab_size": 10**12}, "vocab_size=|another shape"),  # memory is taken after shapes are compared
    (("llama",), {"intermediate_size": 10**12}, "intermediate_size=|another shape"),
    (("llama",), {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
    (("llama",), {"dtype": "nothing"}, "cannot read the config.json.*nothing"),
    (("llama",), {"transformers_weights": "x.safetensors"}, "transformers_weights='x.safetensors'"),
    (("llama",), {"num_hidden_layers": 1}, "early exit needs at least 2"),
    (("llama",), {"quantization_config": "x"}, "cannot read the config.json of"),
    (("llama",), {"quantization_config": {"bits": 4}}, "quantised by an unknown method"),
    (("llama",), {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by gptq.*convert it to GGUF"),
    (("llama",), {"quantization_config": {"quant_method": "compressed-tensors"}}, "by compressed-tensors.*to GGUF"),
    (("llama",), {"compression_config": {"quant_method": "awq"}}, "by awq.*load the checkpoint that it was made from"),
    (("qwen2",), {"model_type": "qwen2_moe"}, "a mixture of experts"),
]


@pytest.mark.parametrize("number", range(len(EQUAL)))
def test_equal(number: int, tmp_path: Path) -> None:
    kinds, fields = EQUAL[number]
    for kind in kinds:
        folder = tmp_path / kind
        folder.mkdir()
        with_fields(kind, fields, folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = load_model(folder, dtype="float32", device="cpu", layout="plain")
        torch.testing.assert_close(lean_logits(ours, TEXT), full_logits(theirs, TEXT), rtol=1e-4, atol=1e-4)
        plain, whole = load_config(folder), AutoConfig.from_pretrained(folder)
        read = {*vars(plain), *vars(whole), "name_or_path", "model_type", "is_causal", "layer_types"} - {"_plain"}
        known = {
            name: getattr(plain, name, None) for name in read if type(plain) is not PlainConfig or name in vars(plain)
        }
        assert known == {name: getattr(whole, name, None) for name in known}
        assert isinstance(plain, type(whole))
        assert (
            copy.deepcopy(plain).to_dict()
            == pickle.loads(pickle.dumps(copy.deepcopy(plain))).to_dict()
            == whole.to_dict()
        )
        assert plain.use_cache is True and type(plain) is type(whole)


def test_a_forked_child_finds_the_lock_of_plain_configurations_free() -> None:
    assert plain_config._lock in fork_safe._locks


def test_usual_files_are_read_without_transformers_classes(tmp_path: Path) -> None:
    """And keep what is written to them, and what is taken away, when they become whole."""
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        (folder := tmp_path / kind).mkdir()
        config = load_config(with_fields(kind, {}, folder))
        assert type(config) is PlainConfig, kind
        shown = copy.deepcopy(config)
        assert '"hidden_size"' in repr(shown) and copy.deepcopy(config) == shown and type(shown) is not PlainConfig
        config.hidden_size, config.quantization_config = 64, {"quant_method": "gguf"}
        floats = copy.deepcopy(config)
        del floats.quantization_config
        assert type(floats) is type(config) is PlainConfig
        assert config.use_cache and config.hidden_size == 64 and config.quantization_config["quant_method"] == "gguf"
        assert floats.use_cache and floats.hidden_size == 64 and not hasattr(floats, "quantization_config")


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number: int, tmp_path: Path) -> None:
    kinds, fields, message = REFUSED[number]
    for kind in kinds:
        folder = tmp_path / kind
        folder.mkdir()
        with pytest.raises((ValueError, OSError), match=f"(?s){message}") as found:
            load_model(with_fields(kind, fields, folder), dtype="float32", device="cpu")
        assert "\n" not in str(found.value)
