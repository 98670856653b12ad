"""What a GGUF file says of its model, apart from the tensors: read into a configuration, or refused by name.

transformers reads about ten keys and passes over the others. Those that change what a model computes (a sliding window,
scaled rotary positions, heads of another size, experts, factors on logits) are read here. A key that nobody here knows is
refused, unless its value says that what it is about is switched off.

ValueErrors here begin with what the file does or has: the caller adds its name in front and the remedy at the end.
Source: gguf's `constants.py`; llama.cpp's loaders of the families, for what is assumed where a key is missing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.typed_fields import is_int, is_number
from layerskip_models.families import FAMILIES
from layerskip_models.families.plain_config import known_config
from layerskip_models.families.unsupported import need_of
from layerskip_models.text_files import in_a_line

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "ouro", "nanbeige")
"""By llama.cpp's names, which are also transformers' names of the families. A Mistral's file is one of a Llama."""
ROPE_FACTORS = "rope_freqs.weight"
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_EPS, _BASE, _WINDOW = "attention.layer_norm_rms_epsilon", "rope.freq_base", "attention.sliding_window"
_MORE_SIZES = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size",
)  # fmt: skip
_TEXT_KINDS = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "llama4": "llama4_text"}
"""transformers' names of the language models that llama.cpp calls so."""
_ROPE = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor")
_UNUSED = frozenset(
    {
        "pooling_type", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned",
        "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
"""Keys about embeddings, about how the file was made, and about "yarn", which is refused."""
_READ = frozenset({*_SIZES, *_MORE_SIZES, *_ROPE, _EPS, _BASE, _WINDOW})
_LOOPS, _NO_NORM = "num_loops", "skip_loop_final_norm"
"""Keys of looped models. A Nanbeige's file without the first is of an earlier model, whose layers run once."""
_LARGEST_HEAD = 1 << 14
_TOKENS = ("bos", "eos", "eot", "eom", "padding")
_DEFAULT_BASE = 10000.0
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class UnsupportedModelError(ValueError):
    """No checkpoint of such a model is run, whatever its format."""


def architecture_of(reader: GgufReader) -> str:
    """By the name that llama.cpp gives it. ValueError for a file without one."""
    kind = reader.value("general.architecture")
    if not isinstance(kind, str):
        raise ValueError(f"names no architecture (general.architecture is {kind!r})")
    return kind


def read_keys(reader: GgufReader) -> dict[str, Any]:
    """Read the keys of the file's own architecture, without its name. ValueError for those not read, or wrong."""
    kind = architecture_of(reader)
    prefix, looped = f"{kind}.", kind in FAMILIES and FAMILIES[kind].set_loops is not None
    keys = {name.removeprefix(prefix): reader.value(name) for name in reader.keys if name.startswith(prefix)}
    for name in (*_SIZES, _EPS, *([_LOOPS] if kind == "ouro" else [])):
        if name not in keys:
            raise ValueError(f"lacks {prefix}{name}")
    for name in keys.keys() & {*_SIZES, *_MORE_SIZES, _LOOPS}:
        if isinstance(keys[name], list):
            raise ValueError(f"has another {prefix}{name} in each layer, which is not read")
        if not is_int(keys[name]) or keys[name] < 1:
            raise ValueError(f"says {prefix}{name} = {keys[name]!r}, and a number from 1 is meant")
    for name in keys.keys() & {_EPS, _BASE, "rope.scaling.factor", "rope.scaling.attn_factor"}:
        if not is_number(keys[name]) or keys[name] <= 0:
            raise ValueError(f"says {prefix}{name} = {keys[name]!r}, and a number above 0 is meant")
    for name in sorted(keys.keys() - _READ - _UNUSED - ({_LOOPS, _NO_NORM} if looped else set())):
        if not _is_off(name, keys[name]):
            if name == "expert_count":
                raise UnsupportedModelError(f"has {keys[name]} experts, which would need {need_of('mixtral')}")
            raise ValueError(f"says {prefix}{name} = {keys[name]!r}, which is not read")
    for kind in _TOKENS:
        _token(reader, kind)
    return keys


def read_config(reader: GgufReader) -> Any:
    """Read transformers' configuration. Raises ValueError for what is not read, or what the family does not do."""
    kind = architecture_of(reader)
    if kind not in ARCHITECTURES:
        read = f"GGUF files of {', '.join(ARCHITECTURES)} are read"
        if kind in FAMILIES:
            raise ValueError(f"is a {kind!r} model; {read}")
        need = need_of(_TEXT_KINDS.get(kind, kind))
        raise UnsupportedModelError(f"is a {kind!r} model, which would need {need}; {read}")
    keys = read_keys(reader)
    if keys["block_count"] > len(reader.tensors):  # before anything is built of each
        raise ValueError(f"says {kind}.block_count = {keys['block_count']}, and it has {len(reader.tensors)} tensors")
    vocab_size = keys.get("vocab_size") or reader.length("tokenizer.ggml.tokens")
    said = {
        "num_hidden_layers": keys["block_count"],
        "max_position_embeddings": keys["context_length"],
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys.get("attention.head_count_kv", keys["attention.head_count"]),
        "rms_norm_eps": keys[_EPS],
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        **({} if vocab_size is None else {"vocab_size": vocab_size}),
    }
    family = FAMILIES[kind]
    if family.set_loops is not None:
        said |= {**family.set_loops(keys.get(_LOOPS, 1)), _NO_NORM: keys.get(_NO_NORM, False)}
    try:
        config: Any = known_config(family, said) or family.config(**said)
    except Exception as error:  # of many kinds, from transformers' own checks
        raise ValueError(f"describes a model that cannot be ({in_a_line(error)})") from error
    _complete(config, keys, reader)
    return config


def _complete(config: Any, keys: dict[str, Any], reader: GgufReader) -> None:
    """Heads, rotary positions, windows and special tokens, of which much follows from what is missing."""
    heads, width = keys["attention.head_count"], keys["embedding_length"]
    if config.model_type == "llama" and "attention.head_count_kv" not in keys:
        raise ValueError("lacks llama.attention.head_count_kv, without which transformers leaves keys in another order")
    head_dim = keys.get("attention.key_length", width // heads)
    if head_dim > _LARGEST_HEAD:
        raise ValueError(f"has heads of {head_dim} numbers, and at most {_LARGEST_HEAD} are meant")
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise ValueError("has values of another size than keys, which is not read")
    if hasattr(config, "head_dim") or head_dim != width // heads:
        config.head_dim = head_dim
    rope = {**(config.rope_parameters or {}), "rope_theta": float(keys.get(_BASE, _DEFAULT_BASE))}
    rotated = keys.get("rope.dimension_count", head_dim)
    if rotated % 2:
        raise ValueError(f"rotates {rotated} numbers of a head (rope.dimension_count), and pairs are meant")
    if config.model_type == "phi3":
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ValueError(f"rotates {rotated} of {head_dim} numbers of a head (rope.dimension_count), which is not read")
    config.rope_parameters = {**rope, **_rope(keys, rope["rope_theta"], head_dim, reader)}
    _set_window(config, keys)
    config.bos_token_id = _token(reader, "bos")
    ends = [_token(reader, kind) for kind in ("eos", "eot", "eom")]  # of a text or of a turn
    config.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None)) or None
    config.pad_token_id = _token(reader, "padding")


def _set_window(config: Any, keys: dict[str, Any]) -> None:
    """Set the sliding window, which the file has without saying of which layers; transformers' Phi-3 has it in all."""
    window = keys.get(_WINDOW) or 0
    if not is_int(window) or window < 0:
        raise ValueError(f"says {_WINDOW} = {window!r}, and a number is meant")
    if config.model_type == "phi3":
        config.sliding_window = window or None
    elif 0 < window < keys["context_length"]:
        raise ValueError(f"has a sliding window of {window} positions without its layers, which is read for Phi-3 only")


def _is_off(name: str, value: Any) -> bool:
    """Return whether a value says that what the key is about is not there."""
    if name == "attention.causal":
        return value is True
    if name.endswith("scale") and value == 1:
        return True
    values = value if isinstance(value, list) else [value]
    return not any(values)


def _token(reader: GgufReader, kind: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    found = reader.value(key)
    if found is not None and not is_int(found):
        raise ValueError(f"says {key} = {found!r}, and a token's number is meant")
    return found


def _rope(keys: dict[str, Any], theta: float, head_dim: int, reader: GgufReader) -> dict[str, Any]:
    """Read rotary scaling: a kind and a factor (linear), or what each frequency is divided by (Llama 3)."""
    kind, factor, attention = (keys.get(name) for name in _ROPE)
    scaling = kind or "none"
    factors = np.ones(1)
    tensor = next((tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    if tensor is not None:
        if tensor.tensor_type.name == "F32" and tensor.shape == (head_dim // 2,):
            factors = reader.file.tensor(tensor.begin, torch.float32, tensor.shape).numpy()
        if len(factors) != head_dim // 2 or not (np.isfinite(factors) & (factors > 0)).all():
            raise ValueError(f"has a {ROPE_FACTORS} that does not fit heads of {head_dim} numbers")
    if scaling in ("none", "linear") and attention in (None, 1.0):
        if np.allclose(factors, factors[0], rtol=1e-4):
            total = float(factors[0]) * ((factor or 1.0) if scaling == "linear" else 1.0)
            return {} if math.isclose(total, 1.0, rel_tol=1e-4) else {"rope_type": "linear", "factor": total}
        llama_3 = {"rope_type": "llama3", "factor": float(round(factors.max())), **_LLAMA_3}
        if scaling == "none" and np.allclose(factors, _llama_3_factors(theta, head_dim, llama_3), rtol=1e-3):
            return llama_3
    raise ValueError(f"scales rotary positions in a way that is not read here ({scaling})")


def _llama_3_factors(theta: float, head_dim: int, rope: dict[str, Any]) -> np.ndarray:
    """Return what Llama 3 divides each rotary frequency by, [head_dim / 2], of those `rope_parameters`."""
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)
