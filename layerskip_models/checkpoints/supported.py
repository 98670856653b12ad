"""Which models can be run: checks of a configuration and of a model in memory, each with an error that says what to do.

Most fields of a configuration need no check: transformers builds the model, and its weights and rotary frequencies are taken
over as they are. What is left is what only transformers' forward reads (`is_causal`, the layers' types), numbers that do not
go together, and weights that are quantised in a way that is not read: only GGUF files may hold quantised ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from layerskip_models.checkpoints.as_built import MERGE, check_as_built
from layerskip_models.checkpoints.parameters import rotary_frequencies
from layerskip_models.checkpoints.typed_fields import is_int
from layerskip_models.families import FAMILIES, Family, find_family
from layerskip_models.families.plain_config import COUNTS
from layerskip_models.families.unsupported import need_of
from layerskip_models.text_files import in_a_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LAYERSKIP_CHECKPOINTS = (
    "facebook/layerskip-llama2-7B",
    "facebook/layerskip-llama2-13B",
    "facebook/layerskip-llama2-70B",
    "facebook/layerskip-codellama-7B",
    "facebook/layerskip-codellama-34B",
    "facebook/layerskip-llama3-8B",
    "facebook/layerskip-llama3.2-1B",
)
"""Meta's LayerSkip checkpoints, all of the Llama family."""

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
GGUF_METHOD = "gguf"
"""What `quantization_config` says of a configuration that was read from a GGUF file."""
MAX_LAYERS = 1 << 14
_LARGEST_HEAD = 1 << 14  # beyond it rotary tables alone may fill the memory
_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_config(config: Any, name: str) -> PreTrainedConfig:
    """Return the config if this engine runs such a model; ValueError that lists what is supported if not."""
    family = find_family(config)
    if family is None:
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(f"{name} is a {kind!r} model, which would need {need_of(kind)}; {_supported()}")
    if config.hidden_act != "silu":
        raise ValueError(f"{name} uses hidden_act={config.hidden_act!r}; supported is 'silu'")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in family.ropes:
        raise ValueError(f"{name} uses {rope!r} rope scaling; supported are {', '.join(family.ropes)}")
    _check_fields(config, family, name)
    loops = family.loops(config)
    if not _is_count(loops) or loops * config.num_hidden_layers > MAX_LAYERS:
        few = f"for at most {MAX_LAYERS} layers in all"
        raise ValueError(f"{name} runs its layers {loops!r} times, where a whole number from 1 is meant, {few}")
    if loops * config.num_hidden_layers < 2:
        raise ValueError(f"{name} has {config.num_hidden_layers} layer; an early exit needs at least 2")
    _check_quantisation(config, name)
    try:
        rotary_frequencies(config)
    except Exception as error:  # of any kind: numbers that don't go together fail anywhere in transformers
        raise ValueError(f"the configuration of {name} builds no model ({in_a_line(error)})") from error
    return config


def _supported() -> str:
    names = (f"{family.model_name} ({family.title})" for family in FAMILIES.values())
    return f"supported are {', '.join(names)}; trained for early exit are {', '.join(LAYERSKIP_CHECKPOINTS)}"


def check_transformers(model: Any) -> PreTrainedConfig:
    """Return the configuration of a model in memory; ValueError if `from_transformers` cannot copy it."""
    if not any(family.has_built(model) for family in FAMILIES.values()):
        if hasattr(model, "merge_and_unload"):
            raise ValueError(f"a {type(model).__name__} holds adapters beside the weights: {MERGE}")
        kind = getattr(getattr(model, "config", None), "model_type", None)
        need = "" if kind is None or kind in FAMILIES else f", which would need {need_of(kind)}"
        if (family := FAMILIES.get(str(kind))) is not None and family.foreign:
            need = ", of which only the checkpoint's own files are read: give load_model() its name"
        raise ValueError(f"expected a model for text generation, got a {type(model).__name__}{need}; {_supported()}")
    config = check_config(model.config, model.config.name_or_path or type(model).__name__)
    if quantisation_of(config) is not None:
        raise ValueError("a model that transformers holds quantised cannot be converted: give load_model() its name")
    _check_weights(model)
    check_as_built(model, config)
    return config


def _check_weights(model: PreTrainedModel) -> None:
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ValueError(f"the model's weights must be on one device, they are on {sorted(map(str, devices))}")
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or next(iter(dtypes)) not in DTYPES.values():
        raise ValueError(
            f"the model's weights must be of one dtype out of {', '.join(DTYPES)}, "
            f"they are {sorted(map(str, dtypes))}: call model.to(torch.float32), or load it unquantised"
        )


def quantisation_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return what a configuration says of quantised weights; None if they are not quantised."""
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if found is None:
        return None
    if not isinstance(found, Mapping) and not hasattr(found, "to_dict"):
        raise ValueError(f"quantization_config is {found!r}, which is no description of quantised weights")
    return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())


def _check_quantisation(config: PreTrainedConfig, name: str) -> None:
    """ValueError that says what to do if the weights are quantised, unless they are those of a GGUF file."""
    settings = quantisation_of(config)
    method = GGUF_METHOD if settings is None else str(settings.get("quant_method", "an unknown method")).lower()
    if method != GGUF_METHOD:
        raise ValueError(
            f"{name} cannot be loaded: its weights are quantised by {method}. Of quantised weights only GGUF files are read. "
            'What to do: convert it to GGUF, or load the checkpoint that it was made from, with dtype="int8" for 8 bits here'
        )


def _check_fields(config: Any, family: Family, name: str) -> None:
    """ValueError that names the first field with a value that is not run."""
    for field in COUNTS:
        _check(_is_count(getattr(config, field)), name, config, field, "a whole number from 1")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    _check(heads % kv_heads == 0, name, config, "num_key_value_heads", f"a divisor of the {heads} heads")
    if getattr(config, "head_dim", None) is not None:
        fits = _is_count(config.head_dim) and config.head_dim <= _LARGEST_HEAD
        _check(fits, name, config, "head_dim", f"a whole number from 1 to {_LARGEST_HEAD}")
    fits = config.hidden_size // heads <= _LARGEST_HEAD
    _check(fits, name, config, "hidden_size", f"at most {_LARGEST_HEAD} for each of {heads} heads")
    eps = config.rms_norm_eps
    _check(isinstance(eps, (int, float)) and 0 <= eps < math.inf, name, config, "rms_norm_eps", "a number from 0")
    if not getattr(config, "is_causal", True):
        raise ValueError(f"{name} has is_causal=False and attends to both sides of a token; it writes no text")
    if getattr(config, "transformers_weights", None) is not None:
        own = config.transformers_weights
        raise ValueError(f"{name} names its own weights (transformers_weights={own!r}): call them model.safetensors")
    padding, vocab_size = getattr(config, "pad_token_id", None), config.vocab_size
    fits = padding is None or (is_int(padding) and -vocab_size <= padding < vocab_size)
    _check(fits, name, config, "pad_token_id", f"a token of the vocabulary of {vocab_size}")
    _check_windows(config, family, name)
    _check_rope(config, name)


def _check_windows(config: Any, family: Family, name: str) -> None:
    types = getattr(config, "layer_types", None)
    if types is not None:
        fits = isinstance(types, list) and len(types) == config.num_hidden_layers and {*types} <= {*_LAYER_TYPES}
        _check(fits, name, config, "layer_types", f"{' or '.join(_LAYER_TYPES)} for each layer")
        if "sliding_attention" in types and getattr(config, "sliding_window", None) is None:
            raise ValueError(f"{name} has layers of sliding_attention in layer_types, but no sliding_window")
    rotated = getattr(config, "no_rope_layers", None)
    if rotated is not None:
        fits = isinstance(rotated, list) and len(rotated) >= config.num_hidden_layers
        _check(fits, name, config, "no_rope_layers", "a number for each layer")
    for layer in range(config.num_hidden_layers):
        window = family.sliding_window(config, layer)
        _check(window is None or _is_count(window), name, config, "sliding_window", "a whole number from 1, or null")


def _check_rope(config: Any, name: str) -> None:
    rope = config.rope_parameters
    _check(isinstance(rope, dict), name, config, "rope_parameters", "fields")
    for field in ("rope_theta", "partial_rotary_factor", "factor"):
        value = rope.get(field, 1.0)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        if not fits or (field == "partial_rotary_factor" and value > 1):
            raise ValueError(f"{name} has {field}={value!r} in rope_parameters, a number above 0 is meant")


def _check(fits: bool, name: str, config: Any, field: str, meant: str) -> None:
    if not fits:
        raise ValueError(f"{name} has {field}={getattr(config, field)!r}, where {meant} is meant")


def _is_count(value: Any) -> bool:
    return is_int(value) and value >= 1
