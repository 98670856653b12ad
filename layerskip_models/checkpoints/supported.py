"""Which models can be run: checks of a configuration and of a model in memory, each with an error that says what to do."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip_models.checkpoints.quantised import check_quantisation, quantisation_of

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
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

_MERGE = "merge adapters into the weights first (PEFT: model = model.merge_and_unload())"


def check_config(config: object, name: str) -> LlamaConfig:
    """Return the config if this engine runs such a model; ValueError that lists what is supported if not."""
    if not isinstance(config, LlamaConfig) or config.model_type != "llama":
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(
            f"{name} is a {kind!r} model; supported are {', '.join(SUPPORTED_ARCHITECTURES)} checkpoints "
            f"(Llama 2, Llama 3, CodeLlama), such as {', '.join(LAYERSKIP_CHECKPOINTS)}"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"{name} uses hidden_act={config.hidden_act!r}; supported is 'silu'")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in SUPPORTED_ROPE:
        raise ValueError(f"{name} uses {rope!r} rope scaling; supported are {', '.join(SUPPORTED_ROPE)}")
    if config.num_hidden_layers < 2:
        raise ValueError(f"{name} has {config.num_hidden_layers} layer; an early exit needs at least 2")
    check_quantisation(config, name)
    return config


def check_transformers(model: object) -> LlamaConfig:
    """The configuration of a model in memory; ValueError if `from_transformers` cannot copy it."""
    if not isinstance(model, LlamaForCausalLM):
        if hasattr(model, "merge_and_unload"):
            raise ValueError(f"a {type(model).__name__} holds adapters beside the weights: {_MERGE}")
        raise ValueError(
            f"expected a {', '.join(SUPPORTED_ARCHITECTURES)}, got {type(model).__name__}; "
            f"supported checkpoints are Llama 2, Llama 3 and CodeLlama, such as {', '.join(LAYERSKIP_CHECKPOINTS)}"
        )
    config = check_config(model.config, model.config.name_or_path or type(model).__name__)
    if quantisation_of(config) is not None:
        raise ValueError(
            "a model that transformers holds quantised cannot be converted: give load_model() the checkpoint's name or folder"
        )
    _check_weights(model)
    _check_layers(model)
    return config


def _check_weights(model: LlamaForCausalLM) -> None:
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ValueError(f"the model's weights must be on one device, they are on {sorted(map(str, devices))}")
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or next(iter(dtypes)) not in DTYPES.values():
        raise ValueError(
            f"the model's weights must be of one dtype out of {', '.join(DTYPES)}, "
            f"they are {sorted(map(str, dtypes))}: call model.to(torch.float32), or load it unquantised"
        )


def _check_layers(model: LlamaForCausalLM) -> None:
    """Each matrix must be all that its place computes: the weight of an adapter's wrapper is that of the bare model."""
    places = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    for name, module in model.named_modules():
        wrapped = not isinstance(module, nn.Linear) or next(module.children(), None) is not None
        if name.endswith(places) and wrapped:
            raise ValueError(
                f"{name} is a {type(module).__module__}.{type(module).__name__}, not a plain torch.nn.Linear, and what it "
                f"adds would be left out: {_MERGE}"
            )
