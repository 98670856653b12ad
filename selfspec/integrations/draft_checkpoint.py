"""`selfspec export-draft`: the first layers of a model, its norm and its head as a small checkpoint of the same family.

Engines that take a second model for drafting load it as any other: transformers as `assistant_model`, and others under names
of their own. It reads the text itself and keeps a cache of its own, which selfspec does not need.

An exit adapter becomes one more decoder layer, exactly, where it can: it is the MLP of a pre-norm layer whose norm has
weight 1 and whose attention adds 0. The rows that it does not need are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from layerskip_models.exits.adapter import ExitAdapter

_PER_LAYER = ("layer_types", "no_rope_layers")
"""Lists in a configuration with an entry for each layer."""
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_LEFT_OUT = "export the bare exit with --exits none"


def draft_model(model: PreTrainedModel, exit_layer: int, adapter: ExitAdapter | None = None) -> PreTrainedModel:
    """A model of the same class with the first `exit_layer` layers, and one more for an adapter.

    Its weights are the tensors of `model`, not copies; what a checkpoint does not store stays on the meta device, so save
    the model and load it again. Raises ValueError for an exit layer that the model does not have, and for an adapter that no
    checkpoint of this family can hold.
    """
    config = model.config
    if not 1 <= exit_layer < config.num_hidden_layers:
        raise ValueError(
            f"exit_layer must be in [1, {config.num_hidden_layers - 1}] for this {config.num_hidden_layers}-layer model, "
            f"got {exit_layer}"
        )
    with torch.device("meta"):
        draft = type(model)(_shortened(config, exit_layer, adapter is not None)).to(model.dtype)
    weights = {}
    for name, tensor in model.state_dict().items():
        index = _layer_of(name)
        if index is None or index < exit_layer:
            weights[name] = tensor
    if adapter is not None:
        added = _folded(adapter, model.model.layers[exit_layer], config)
        weights |= {f"model.layers.{exit_layer}.{name}": tensor.to(model.dtype) for name, tensor in added.items()}
    draft.load_state_dict(weights, assign=True)
    draft.tie_weights()
    draft.generation_config = model.generation_config
    return draft


def _layer_of(name: str) -> int | None:
    """The index of the decoder layer that a weight belongs to; None for a weight outside the layers."""
    _, found, rest = name.partition("model.layers.")
    return int(rest.partition(".")[0]) if found else None


def _shortened(config: PretrainedConfig, exit_layer: int, one_more: bool) -> PretrainedConfig:
    values: dict[str, Any] = config.to_dict()
    values["num_hidden_layers"] = exit_layer + one_more
    for name in _PER_LAYER:
        if isinstance(values.get(name), list):
            more = ["full_attention" if name == "layer_types" else 1] if one_more else []
            values[name] = values[name][:exit_layer] + more
    return type(config).from_dict(values)


def _folded(adapter: ExitAdapter, like: nn.Module, config: PretrainedConfig) -> dict[str, Tensor]:
    """The weights of a decoder layer that computes what the adapter does; like: a layer of the model.

    The two may differ in the norms' epsilon, which is far below the mean square of hidden states.
    """
    kind = adapter.config
    weights = {name: torch.zeros_like(tensor) for name, tensor in like.state_dict().items()}
    parts = {name.partition(".")[0] for name in weights}
    gated = {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"} <= weights.keys()
    fused = {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"} <= weights.keys()
    if parts != _PARTS or not (gated or fused) or config.hidden_act != "silu":
        raise ValueError(f"layers of a {config.model_type!r} model cannot hold an exit adapter: {_LEFT_OUT}")
    if kind.rank > config.intermediate_size:
        raise ValueError(
            f"an adapter of rank {kind.rank} does not fit into an MLP of width {config.intermediate_size}: {_LEFT_OUT}"
        )
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
    scale, rank, width = adapter.scale.detach(), kind.rank, config.intermediate_size
    gate, up = adapter.gate.weight.detach(), adapter.up.weight.detach()
    if gated:
        weights["mlp.gate_proj.weight"][:rank] = gate
        weights["mlp.up_proj.weight"][:rank] = up
    else:
        weights["mlp.gate_up_proj.weight"][:rank] = gate
        weights["mlp.gate_up_proj.weight"][width : width + rank] = up
    weights["mlp.down_proj.weight"][:, :rank] = scale * adapter.down.weight.detach()
    return weights
