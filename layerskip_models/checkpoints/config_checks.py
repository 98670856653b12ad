"""Fields of a configuration that would make another model, or none, compared with what the engine runs.

Most fields need no check: transformers builds the model, and its weights and rotary frequencies are taken over as they are.
What is left is what only transformers' forward reads (`is_causal`, the layers' types), and numbers that do not go
together.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch

from layerskip_models.checkpoints.shell import MetaModel
from layerskip_models.checkpoints.typed_fields import is_int
from layerskip_models.families import Family, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_LARGEST_HEAD = 1 << 14  # beyond it rotary tables alone may fill the memory
_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_fields(config: Any, family: Family, name: str) -> None:
    """ValueError that names the first field with a value that is not run."""
    for field in _COUNTS:
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
        raise ValueError(
            f"{name} names its own file of weights (transformers_weights={config.transformers_weights!r}); read are "
            "model.safetensors and its index: rename the file"
        )
    _check_windows(config, family, name)
    _check_rope(config, name)


def built_on_meta(config: Any, name: str) -> PreTrainedModel:
    """Let transformers build a configuration's model, without memory. ValueError, of one line, if it builds none."""
    try:
        with torch.device("meta"):
            return family_of(config).model(copy.deepcopy(config))
    except Exception as error:  # of any kind: numbers that don't go together fail anywhere in transformers
        raise ValueError(
            f"transformers builds no model from the configuration of {name} "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def shell_of(config: Any, name: str) -> MetaModel:
    """Make the parameters of the model that transformers would build, without memory. Errors as in `built_on_meta`."""
    try:
        return MetaModel(copy.deepcopy(config))
    except Exception as error:  # of any kind: numbers that don't go together fail anywhere
        raise ValueError(
            f"the configuration of {name} builds no model ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def shapes_of(config: Any, name: str) -> dict[str, torch.Size]:
    """Return the shape of every tensor of the model that transformers would build. Errors as in `built_on_meta`."""
    return {tensor: value.shape for tensor, value in shell_of(config, name).state_dict().items()}


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
