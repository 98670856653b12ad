"""From a transformers model in memory to a `LayerSkipModel`: weights are fused and laid out, layer by layer.

`release` hands each layer's original weights back as soon as they are converted, so that nothing is resident twice; else they
are copied, because the model must stay as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from layerskip_models.checkpoints.supported import check_transformers
from layerskip_models.linear import (
    COMPACT,
    LAYOUTS,
    Layout,
    PlainLinear,
    check_layout,
    default_layout,
)
from layerskip_models.model import DecoderLayer, LayerSkipModel, interleave_heads
from layerskip_models.norm import RMSNorm

DRAFT_HEAD_BYTES = 16 << 20
"""Heads from this size on get a second one in 8 bits, which drafts are chosen with: smaller ones stay in a cache."""


def arithmetic_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model with weights of this dtype is computed in: on a CPU, 16-bit weights take part in float32 arithmetic.

    PyTorch's products of 16-bit matrices on a CPU depend on how many rows they have, so that a text would depend on how it
    was drafted. In float32 it depends on the model and the prompt. Elsewhere a model is computed in its own dtype.
    """
    return torch.float32 if device.type == "cpu" and weights in (torch.bfloat16, torch.float16) else weights


def from_transformers(
    model: LlamaForCausalLM, *, layout: Layout | None = None, release: bool = False
) -> LayerSkipModel:
    """Convert a model that transformers holds in memory.

    release: False copies the weights and leaves `model` as it is (they are then resident twice, the price of a fused
        layout beside a model that stays usable); True empties `model` while converting it.
    Raises ValueError for another architecture, weights that are quantised, offloaded or on several devices.
    """
    config = check_transformers(model)
    with torch.inference_mode(False), torch.no_grad():
        return _convert(model, config, layout, release)


def _convert(model: LlamaForCausalLM, config: LlamaConfig, layout: Layout | None, release: bool) -> LayerSkipModel:
    decoder = model.model
    stored = decoder.norm.weight.dtype
    dtype = arithmetic_dtype(stored, decoder.norm.weight.device)
    if layout is not None:
        check_layout(layout, model.lm_head.weight.new_empty(0, dtype=dtype))

    def layout_of(weight: Tensor) -> Layout:
        return default_layout(weight) if layout is None else layout

    def norm(weight: Tensor) -> RMSNorm:
        return RMSNorm(weight.detach().to(dtype, copy=True), config.rms_norm_eps)

    layers = []
    for layer in decoder.layers:
        layers.append(convert_layer(layer, config, layout_of, dtype))
        if release:
            _release(layer)

    embedding = decoder.embed_tokens.weight.detach()
    head_weight = model.lm_head.weight.detach()
    tied = head_weight.data_ptr() == embedding.data_ptr()
    if not release:
        embedding = embedding.clone()
        head_weight = embedding if tied else head_weight.clone()
    head_weight = head_weight.to(dtype)
    head_layout = layout_of(head_weight)
    head = LAYOUTS[head_layout](head_weight, None)
    draft_head = None
    if head_layout == "native" and head.num_bytes >= DRAFT_HEAD_BYTES:
        draft_head = LAYOUTS["int8"](head_weight, None)
    if tied and isinstance(head, PlainLinear):
        embedding = head.weight  # one copy serves both
    elif (
        dtype == stored and head_layout in COMPACT and torch.equal(embedding.bfloat16().to(embedding.dtype), embedding)
    ):
        embedding = embedding.bfloat16()
    result = LayerSkipModel(
        config,
        dtype=dtype,
        weights_dtype=stored,
        embedding=embedding,
        layers=layers,
        final_norm=norm(decoder.norm.weight),
        head=head,
        draft_head=draft_head,
        inv_freq=decoder.rotary_emb.inv_freq.detach().float().clone(),
        rotary_scaling=float(decoder.rotary_emb.attention_scaling),
        generation_config=copy.deepcopy(model.generation_config),
        name=config.name_or_path or None,
    )
    if release:
        _release(model)
    return result


def convert_layer(
    layer: LlamaDecoderLayer, config: LlamaConfig, layout_of: Callable[[Tensor], Layout], dtype: torch.dtype
) -> DecoderLayer:
    """Copy a transformers layer into the fused layout.

    layout_of: the layout of one of its four matrices. dtype: what the layer is computed in.
    """
    norms = {
        "qkv": RMSNorm(layer.input_layernorm.weight.detach().to(dtype, copy=True), config.rms_norm_eps),
        "gate_up": RMSNorm(layer.post_attention_layernorm.weight.detach().to(dtype, copy=True), config.rms_norm_eps),
    }
    fused = {
        kind: (weight.to(dtype), None if bias is None else bias.to(dtype))
        for kind, (weight, bias) in _fuse_layer(layer, config).items()
    }
    layouts = {kind: layout_of(weight) for kind, (weight, _) in fused.items()}
    for kind, before in norms.items():
        factors = None if layouts[kind] in COMPACT else before.fold()
        if factors is not None:
            fused[kind][0].mul_(factors)
    projections = {kind: LAYOUTS[layouts[kind]](*parts) for kind, parts in fused.items()}
    return DecoderLayer(input_norm=norms["qkv"], post_attention_norm=norms["gate_up"], **projections)


def _fuse_layer(layer: LlamaDecoderLayer, config: LlamaConfig) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weight and bias of the four fused projections of a transformers layer, as new tensors."""
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def fuse(parts: list[Tensor | None]) -> Tensor | None:
        return None if parts[0] is None else torch.cat([p.detach() for p in parts if p is not None])

    def interleaved(values: Tensor | None, count: int) -> Tensor | None:
        return None if values is None else interleave_heads(values.detach(), count)

    def copied(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.detach().clone()

    def qkv(field: str) -> Tensor | None:
        query, key, value = (getattr(p, field) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        return fuse([interleaved(query, heads), interleaved(key, kv_heads), value])

    fused = {
        "qkv": (qkv("weight"), qkv("bias")),
        "output": (copied(attention.o_proj.weight), copied(attention.o_proj.bias)),
        "gate_up": (
            fuse([mlp.gate_proj.weight, mlp.up_proj.weight]),
            fuse([mlp.gate_proj.bias, mlp.up_proj.bias]),
        ),
        "down": (copied(mlp.down_proj.weight), copied(mlp.down_proj.bias)),
    }
    return {kind: (weight, bias) for kind, (weight, bias) in fused.items() if weight is not None}


def _release(module: nn.Module) -> None:
    """Give the memory of a module's parameters back."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
