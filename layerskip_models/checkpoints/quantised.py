"""Checkpoints that others quantised: which ones are read.

These are integer weights of 4 and 8 bits by compressed-tensors ("pack-quantized", "int-quantized") and by GPTQ, and GGUF
files (`gguf_checkpoint`). Nothing but safetensors is needed for the first two. Float weights are exactly what the file stands
for. Where no dtype is asked for, `load_model` keeps 4-bit matrices in their 4 bits if they fit our layout (`four_bits`), and
rounds all others to this engine's int8, which is a second rounding.

What would compute something else without our noticing is refused: activations that are quantised as well, a quantised KV
cache, weights that are rotated at run time, and formats that are not read here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from layerskip_models.checkpoints.gguf_checkpoint import GGUF_METHOD
from layerskip_models.checkpoints.schemes import ORIGINAL, gptq_format, is_known, schemes_of, strategy_of

READABLE = (
    "compressed-tensors (pack-quantized, int-quantized) and GPTQ with 4- or 8-bit integer weights, and GGUF files"
)
_FORMATS = ("pack-quantized", "int-quantized", "dense")
_REMEDIES = {
    "bitsandbytes": "load it with transformers, call model.dequantize() and save_pretrained(), and load that folder",
    "awq": f"convert it to compressed-tensors or GPTQ, or {ORIGINAL}",
}


def quantisation_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """What a configuration says of quantised weights; None if they are not quantised."""
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if found is None:
        return None
    if not isinstance(found, Mapping) and not hasattr(found, "to_dict"):
        raise ValueError(f"quantization_config is {found!r}, which is no description of quantised weights")
    return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())


def unquantised(config: Any) -> Any:
    """The configuration of the same model with float weights."""
    plain = copy.deepcopy(config)
    for field in ("quantization_config", "compression_config"):
        if hasattr(plain, field):
            delattr(plain, field)
    return plain


def check_quantisation(config: PretrainedConfig, name: str) -> None:
    """ValueError that says what to do if the weights are quantised in a way that is not read here."""
    settings = quantisation_of(config)
    if settings is None:
        return
    method = str(settings.get("quant_method", "an unknown method")).lower()
    problem = None
    if method in ("gptq", "compressed-tensors"):
        try:
            problem = (_gptq_problem if method == "gptq" else _compressed_tensors_problem)(settings)
            if problem is None:
                schemes_of({**settings, "quant_method": method})("model")
        except (AttributeError, TypeError, KeyError, re.error) as error:  # values of other types than are meant
            problem = f"its quantization_config cannot be read ({type(error).__name__}: {error})"
    elif method != GGUF_METHOD:
        problem = f"its weights are quantised by {method}"
    if problem is not None:
        raise ValueError(
            f"{name} cannot be loaded: {problem}. Read are {READABLE}. What to do: {_REMEDIES.get(method, ORIGINAL)}"
        )


def _gptq_problem(settings: Mapping[str, Any]) -> str | None:
    version = gptq_format(settings)
    if version not in ("gptq", "gptq_v2"):
        return f"its GPTQ weights are laid out for {version}"
    if settings.get("rotation"):
        return f"its weights are rotated ({settings['rotation']})"
    if settings.get("pack_dtype", "int32") != "int32":
        return f"its GPTQ weights are packed in {settings['pack_dtype']}"
    if not isinstance(settings.get("group_size", -1), int):
        return f"its group_size is {settings['group_size']!r}"
    bits = settings.get("bits")
    return None if bits in (4, 8) else f"its GPTQ weights are of {bits} bits"


def _compressed_tensors_problem(settings: Mapping[str, Any]) -> str | None:
    named = settings.get("config_groups") or {}
    if not isinstance(named, Mapping) or not all(isinstance(group, Mapping) for group in named.values()):
        return "its config_groups are not groups"
    groups = list(named.values())
    named_formats = (settings.get("format"), *(group.get("format") for group in groups))
    formats = {str(found) for found in named_formats if found not in (None, "mixed-precision")}
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if unread := sorted(formats - set(_FORMATS)):
        return f"its format is {', '.join(unread)}"
    if sparsity != "dense":
        return f"its weights are stored sparse ({sparsity})"
    if settings.get("kv_cache_scheme"):
        return "it was made for a quantised KV cache (kv_cache_scheme)"
    if (settings.get("transform_config") or {}).get("config_groups"):
        return "its weights are rotated at run time (transform_config)"
    for group in groups:
        weights = group.get("weights")
        if group.get("input_activations") or group.get("output_activations"):
            return "its activations are quantised as well (W8A8 and the like), and without that it is another model"
        if weights and (weights.get("type", "int") != "int" or weights.get("num_bits", 8) not in (4, 8)):
            return f"its weights are of {weights.get('num_bits')} bits, type {weights.get('type')}"
        if weights and not isinstance(weights.get("group_size") or 1, int):
            return f"its group_size is {weights['group_size']!r}"
        if weights and not is_known(strategy := strategy_of(weights)):
            return f"its weights have scales by {strategy}"
        if weights and weights.get("block_structure"):
            return f"its weights have scales by block ({weights['block_structure']})"
    return None


def has_few_bits(config: PretrainedConfig) -> bool:
    """Whether the weights are stored in so few bits that int8 is their natural layout: not in a GGUF file of 16 bits."""
    settings = quantisation_of(config)
    return settings is not None and settings.get("few_bits", True)
