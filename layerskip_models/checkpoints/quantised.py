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
from typing import TYPE_CHECKING, Any

from layerskip_models.checkpoints.gguf_checkpoint import GGUF_METHOD
from layerskip_models.checkpoints.schemes import ORIGINAL, schemes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READABLE = (
    "compressed-tensors (pack-quantized, int-quantized) and GPTQ with 4- or 8-bit integer weights, and GGUF files"
)
_REMEDIES = {
    "bitsandbytes": "load it with transformers, call model.dequantize() and save_pretrained(), and load that folder",
    "awq": f"convert it to compressed-tensors or GPTQ, or {ORIGINAL}",
}


def quantisation_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return what a configuration says of quantised weights; None if they are not quantised."""
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if found is None:
        return None
    if not isinstance(found, Mapping) and not hasattr(found, "to_dict"):
        raise ValueError(f"quantization_config is {found!r}, which is no description of quantised weights")
    return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())


def unquantised(config: Any) -> Any:
    """Return the configuration of the same model with float weights."""
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
    method = str(settings.get("quant_method")).lower()
    if method == GGUF_METHOD:
        return
    try:
        schemes_of(settings)
        return
    except ValueError as error:
        problem = str(error)
    except (AttributeError, TypeError, KeyError, re.error) as error:  # values of other types than are meant
        problem = f"its quantization_config cannot be read ({type(error).__name__}: {error})"
    raise ValueError(
        f"{name} cannot be loaded: {problem}. Read are {READABLE}. What to do: {_REMEDIES.get(method, ORIGINAL)}"
    )


def has_few_bits(config: PretrainedConfig) -> bool:
    """Whether the weights are stored in so few bits that int8 is their natural layout: not in a GGUF file of 16 bits."""
    settings = quantisation_of(config)
    return settings is not None and settings.get("few_bits", True)
