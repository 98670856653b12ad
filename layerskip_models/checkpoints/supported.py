"""Which models can be run: checks of a configuration and of a model in memory, each with an error that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from layerskip_models.checkpoints.as_built import MERGE, check_as_built
from layerskip_models.checkpoints.config_checks import check_fields
from layerskip_models.checkpoints.quantised import check_quantisation, quantisation_of
from layerskip_models.families import FAMILIES, find_family
from layerskip_models.families.unsupported import need_of

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

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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
    if config.num_hidden_layers < 2:
        raise ValueError(f"{name} has {config.num_hidden_layers} layer; an early exit needs at least 2")
    check_fields(config, family, name)
    check_quantisation(config, name)
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
        observes = "" if kind is None or kind in FAMILIES else f", which would need {need_of(kind)}"
        raise ValueError(
            f"expected a model for text generation, got a {type(model).__name__}{observes}; {_supported()}"
        )
    config = check_config(model.config, model.config.name_or_path or type(model).__name__)
    if quantisation_of(config) is not None:
        raise ValueError(
            "a model that transformers holds quantised cannot be converted: give load_model() the checkpoint's name or folder"
        )
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
