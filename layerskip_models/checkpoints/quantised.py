"""Checkpoints that others quantised: which ones are read, and how they become a transformers model with float weights.

Read are integer weights of 4 and 8 bits by compressed-tensors ("pack-quantized", "int-quantized") and by GPTQ, and GGUF files
(`gguf_checkpoint`). Nothing but safetensors is needed for the first two. The float weights are exactly what the file stands
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

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel

from layerskip_models.checkpoints.config_checks import shapes_of
from layerskip_models.checkpoints.gguf_checkpoint import GGUF_METHOD, load_gguf, named_gguf, packed_gguf
from layerskip_models.checkpoints.packed_weights import dequantise, in_four_bits, modules_of
from layerskip_models.checkpoints.schemes import (
    NOTHING_SAID,
    SchemeOf,
    gptq_format,
    is_known,
    schemes_of,
    strategy_of,
)
from layerskip_models.checkpoints.weight_files import Tensors, check_shapes, tensors_of
from layerskip_models.families import family_of
from layerskip_models.four_bits import FourBitWeight

READABLE = (
    "compressed-tensors (pack-quantized, int-quantized) and GPTQ with 4- or 8-bit integer weights, and GGUF files"
)
_FORMATS = ("pack-quantized", "int-quantized", "dense")
_ORIGINAL = 'load the checkpoint that it was made from; dtype="int8" rounds that one to 8 bits here'
_REMEDIES = {
    "bitsandbytes": "load it with transformers, call model.dequantize() and save_pretrained(), and load that folder",
    "awq": f"convert it to compressed-tensors or GPTQ, or {_ORIGINAL}",
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
            f"{name} cannot be loaded: {problem}. Read are {READABLE}. What to do: {_REMEDIES.get(method, _ORIGINAL)}"
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


def load_quantised(
    name: str,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keep_packed: bool = False,
    revision: str | None = None,
    local_files_only: bool = False,
) -> tuple[PreTrainedModel, dict[str, FourBitWeight]]:
    """The model with the float weights that the files stand for, as transformers' own, rounded to `dtype`.

    name: a folder, a .gguf file or a hub name. config: as checked by `check_quantisation`.
    keep_packed: matrices of layers that can be kept in the file's own 4 bits are returned as that, by the names of their
        modules, and their parameters in the model are zeros that take no memory. Without it nothing is.
    Raises ValueError for weights that are missing or do not fit together, FileNotFoundError or OSError for files that cannot
    be read.
    """
    settings = quantisation_of(config)
    assert settings is not None
    plain = unquantised(config)
    if settings["quant_method"] == GGUF_METHOD:
        found = packed_gguf(name, plain, dtype) if keep_packed else None
        if found is None:
            return load_gguf(name, plain, dtype=dtype, device=device), {}
        weights, packed = found
        return named_gguf(_filled(name, plain, weights, packed, dtype, device), name), packed
    files = tensors_of(name, {"revision": revision, "local_files_only": local_files_only})
    weights, packed = read_weights(files, dtype, scheme_of=schemes_of(settings), keep_packed=keep_packed)
    model = _filled(name, plain, weights, packed, dtype, device)
    model.config.name_or_path = model.name_or_path = name
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            name, revision=revision, local_files_only=local_files_only
        )
    except OSError:  # it has none
        model.generation_config = GenerationConfig.from_model_config(model.config)
    return model, packed


def _filled(
    name: str,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    packed: Mapping[str, FourBitWeight],
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """transformers' model with these weights, and places without memory for those in 4 bits."""
    broken = [module for module, weight in packed.items() if not weight.is_finite()]
    if broken:
        raise ValueError(f"{name} holds NaN or infinite scales, first in {broken[0]}: copy or download it again")
    places = {
        f"{module}.weight": torch.zeros((), dtype=dtype, device=device).expand(weight.shape)
        for module, weight in packed.items()
    }
    # Before memory is taken for what the configuration says.
    check_shapes(
        name,
        {key: value.shape for key, value in (weights | places).items()},
        shapes_of(config, family_of(config), name),
    )
    model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=weights | places,
        dtype=dtype,
        device_map={"": device},
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # said below, in our words
    )
    check_loaded(found, name)
    unread = sorted(key for key in found["unexpected_keys"] if not key.endswith("rotary_emb.inv_freq"))
    if unread := [key for key in unread if key not in weights or bool(weights[key].any())]:
        raise ValueError(
            f"{name} holds tensors that no part of the model reads, {len(unread)} in all, first {unread[0]}: {_ORIGINAL}"
        )
    return model


def check_loaded(found: Mapping[str, Any], name: str) -> None:
    """ValueError for what transformers' loading info says of weights that are missing or of another shape."""
    wrong = sorted(found["missing_keys"]) or sorted(str(key[0]) for key in found["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"{name} lacks weights of the model, or they have another shape, first {wrong[0]}: copy or download it again"
        )


def read_weights(
    tensors: Tensors,
    dtype: torch.dtype,
    *,
    scheme_of: SchemeOf = lambda module: NOTHING_SAID,
    keep_packed: bool = False,
) -> tuple[dict[str, Tensor], dict[str, FourBitWeight]]:
    """All weights of safetensors files by their names in the unquantised checkpoint, floats in `dtype`.

    keep_packed: matrices of layers stay in 4 bits where they can, and are returned by their modules' names beside the rest.
    Peak memory is the result and one module in float32.
    Raises ValueError that names the module whose tensors do not fit together.
    """
    quantised = modules_of(tensors.names)
    taken = {f"{module}.{part}" for module, parts in quantised.items() for part in parts}
    found: dict[str, Tensor] = {}
    packed: dict[str, FourBitWeight] = {}
    for module, names in quantised.items():
        parts = {part: tensors.whole(f"{module}.{part}") for part in names}
        keeps, scheme = keep_packed and module.startswith("model.layers."), scheme_of(module)
        try:
            weight = in_four_bits(parts, scheme=scheme) if keeps else None
            if weight is not None:
                packed[module] = weight
            else:
                found[f"{module}.weight"] = dequantise(parts, scheme=scheme).to(dtype)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the quantised weight of {module} cannot be read: {error}") from error
    for name in tensors.names - taken:
        tensor = tensors.whole(name)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is of {tensor.dtype}, and nothing says what it stands for: {_ORIGINAL}")
        found[name] = tensor.to(dtype)
    return found, packed
