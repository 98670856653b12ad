"""From a transformers model in memory to a `LayerSkipModel`: weights are fused and laid out, layer by layer.

The weights are copied, because the model must stay as it is. `release` hands each layer's original weights back as soon as
they are converted, so that nothing is resident twice. `share` makes the original ones views of the fused ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerskip_models.checkpoints.as_built import rotary_angles
from layerskip_models.checkpoints.fused_reading import (
    places_of,
    read_eight_bits,
    read_floats,
    read_numbers,
    rounds_while_reading,
)
from layerskip_models.checkpoints.progress import tell
from layerskip_models.checkpoints.stored_tensor import StoredTensor
from layerskip_models.checkpoints.supported import check_transformers
from layerskip_models.decoder_layer import DecoderLayer, interleave_heads
from layerskip_models.families import family_of, head_dim_of
from layerskip_models.grouped_weight import GroupedWeight
from layerskip_models.kernels.native_linear import NativeInt8Linear
from layerskip_models.kernels.pages import expect_large_pages
from layerskip_models.linear import (
    COMPACT,
    LAYOUTS,
    Layout,
    Linear,
    PlainLinear,
    check_layout,
    default_layout,
    grouped_linear,
    keeps_eight_bits,
)
from layerskip_models.model import LayerSkipModel
from layerskip_models.norm import RMSNorm

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DRAFT_HEAD_BYTES = 16 << 20
"""Heads from this size on get a second one in 8 bits, which drafts are chosen with: smaller ones stay in a cache."""
_COMPARED = 1 << 20  # numbers at a time
Packed = Mapping[str, GroupedWeight | StoredTensor]
"""Weights that a checkpoint has in 4 bits, or that are still in its files, by the names of their modules
("model.layers.0.mlp.down_proj")."""
_NOTHING: Packed = MappingProxyType({})


def arithmetic_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that a model with weights of this dtype is computed in: float32 on a CPU for weights of 16 bits.

    PyTorch's products of 16-bit matrices on a CPU depend on how many rows they have, so that a text would depend on how it
    was drafted. In float32 it depends on the model and the prompt. Elsewhere a model is computed in its own dtype.
    """
    return torch.float32 if device.type == "cpu" and weights in (torch.bfloat16, torch.float16) else weights


def from_transformers(
    model: PreTrainedModel,
    *,
    layout: Layout | None = None,
    release: bool = False,
    share: bool = False,
) -> LayerSkipModel:
    """Convert a model that transformers holds in memory.

    release: False copies the weights and leaves `model` as it is (they are then resident twice, the price of a fused
        layout next to a model that stays usable); True empties `model` while converting it.
    share: the parameters of `model` become views of the fused weights instead, with the numbers that they had. Nothing is
        resident twice, and what is written to a parameter in place is seen at once. For weights that are kept as they are:
        on CUDA, or on a CPU layout "plain" in float32 or float64.
    Raises ValueError for another architecture, weights that are quantised, offloaded or on several devices, and where they
    cannot be shared.
    """
    config = check_transformers(model)
    if share and (reason := why_not_shared(model, layout)) is not None:
        raise ValueError(reason)
    with torch.inference_mode(False), torch.no_grad():
        return convert(model, config, "plain" if share else layout, release, share)


def why_not_shared(model: PreTrainedModel, layout: Layout | None = None) -> str | None:
    """Why this model's weights cannot be shared in that layout; None if they can."""
    weight = model.model.norm.weight
    kept = arithmetic_dtype(weight.dtype, weight.device) == weight.dtype
    if not kept or (layout != "plain" and weight.device.type == "cpu"):
        return (
            "weights can be shared where they are kept as they are: on CUDA, or on a CPU in float32 or float64 with "
            "layout='plain'"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        return "weights made in inference mode cannot be shared: load the model outside of it"
    return None


def convert(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    layout: Layout | None,
    release: bool,
    share: bool = False,
    packed: Packed = _NOTHING,
    fill: Callable[[str, nn.Module], None] = lambda name, module: None,
    own_head: StoredTensor | None = None,
) -> LayerSkipModel:
    """`from_transformers` without its checks. fill: called with each layer and its name before it is read.

    packed: of layers' matrices that keep their numbers, or are still in a file. own_head: a head that is. Their parameters
    in `model` then only have the right shape.
    """
    decoder = model.model
    stored = decoder.norm.weight.dtype
    dtype = arithmetic_dtype(stored, decoder.norm.weight.device)
    if layout is not None:
        check_layout(layout, decoder.norm.weight.new_empty(0, dtype=dtype))

    def layout_of(weight: Tensor, layer: int | None = None) -> Layout:
        if layout == "int4" and keeps_eight_bits(layer):
            return "int8"
        return default_layout(weight) if layout is None else layout

    inv_freq = _inv_freq(decoder.rotary_emb, config)
    layers = []
    for index, layer in enumerate(decoder.layers):
        fill(f"model.layers.{index}", layer)
        layers.append(
            convert_layer(
                layer,
                config,
                partial(layout_of, layer=index),
                dtype,
                index=index,
                rotated=2 * inv_freq.numel(),
                share=share,
                packed=packed,
            )
        )
        if release:
            _release(layer)
        tell(index + 1, len(decoder.layers))

    embedding = decoder.embed_tokens.weight.detach()
    head_weight = (model.lm_head.weight if own_head is None else decoder.norm.weight).detach()
    tied = head_weight.device == embedding.device and head_weight.data_ptr() == embedding.data_ptr()
    if not release and not share:
        embedding = embedding.clone()
        head_weight = embedding if tied else head_weight.clone()
    head: Linear
    draft_head: Linear | None = None
    head_layout = layout_of(head_weight.new_empty(0, dtype=dtype))
    if own_head is not None and own_head.is_quantised:
        head = grouped_linear(own_head.quantised(), own=True)
    elif own_head is not None and rounds_while_reading([own_head], head_layout, dtype):
        head = read_eight_bits([own_head], None, None)
    else:
        if own_head is not None:
            head_weight = read_floats([own_head], None, dtype)
        head_weight, head_layout = in_its_layout(head_weight, dtype, layout_of)
        head = LAYOUTS[head_layout](head_weight, None)
        if head_layout == "native" and head.num_bytes >= DRAFT_HEAD_BYTES:
            draft_head = NativeInt8Linear(head_weight)
    if tied and isinstance(head, PlainLinear):
        embedding = head.weight  # one copy serves both
    elif embedding.dtype != stored:  # as the file has it, see `StoredWeights.stored`
        embedding = embedding if head_layout in COMPACT else embedding.to(stored)
    elif dtype == stored and head_layout in COMPACT and _fits_bfloat16(embedding):
        embedding = embedding.bfloat16()
    result = LayerSkipModel(
        config,
        dtype=dtype,
        weights_dtype=dtype if layout in ("int8", "int4") else stored,
        embedding=embedding,
        layers=layers,
        final_norm=_norm(decoder.norm.weight, config, dtype, share),
        head=head,
        draft_head=draft_head,
        inv_freq=inv_freq,
        rotary_scaling=float(decoder.rotary_emb.attention_scaling),
        generation_config=copy.deepcopy(model.generation_config),
        name=config.name_or_path or None,
    )
    if release:
        _release(model)
    return result


def _inv_freq(rotary: Any, config: Any) -> Tensor:
    """Return the frequencies of transformers' rotary embedding, [numbers that rotate / 2].

    ValueError for frequencies that are not numbers, and for part of a head where transformers rotates all of it.
    """
    inv_freq = rotary_angles(rotary).float().clone()
    size, rotated = head_dim_of(config), 2 * inv_freq.numel()
    if not bool(inv_freq.isfinite().all()):
        raise ValueError(f"the rotary frequencies are NaN or infinite: rope_parameters is {config.rope_parameters}")
    if rotated > size or (rotated < size and not family_of(config).rotates_part):
        raise ValueError(
            f"rope_parameters rotate {rotated} of {size} numbers of a head, which a {config.model_type} model does not do"
        )
    return inv_freq


def interleaves(device: torch.device) -> bool:
    """Whether heads are interleaved there: complex numbers are slow on CUDA, and cannot be compiled."""
    return device.type == "cpu"


def convert_layer(
    layer: Any,
    config: PreTrainedConfig,
    layout_of: Callable[[Tensor], Layout],
    dtype: torch.dtype,
    *,
    index: int = 0,
    rotated: int | None = None,
    share: bool = False,
    packed: Packed = _NOTHING,
) -> DecoderLayer:
    """Convert a transformers layer to the fused layout.

    layout_of: the layout of one of its four matrices. dtype: what the layer is computed in. index: its number in the model.
    rotated: how many numbers of a head rotate, its first ones; None for all.
    share: its parameters become views of the fused ones, else they are copied. packed: as in `convert`.
    """
    family, size = family_of(config), head_dim_of(config)
    interleaved = interleaves(layer.mlp.down_proj.weight.device) and not share
    turned = (config.num_attention_heads + config.num_key_value_heads) * size

    def reordered(values: Tensor) -> Tensor:
        """Rows of whole heads, [heads * size, ...], in the order that the kernels want."""
        return interleave_heads(values, values.shape[0] // size, rotated) if interleaved else values

    def norm(name: str | None, of_heads: bool = False) -> RMSNorm | None:
        if name is None:
            return None
        weight = getattr(layer.self_attn if of_heads else layer, name).weight
        return _norm(reordered(weight) if of_heads else weight, config, dtype, share)

    def fused(kind: str, parts: Sequence[Tensor]) -> Tensor:
        """Weights or biases of the linears of a projection as one; a new tensor, unless they are shared."""
        if share:
            return together(parts)
        values = [part.detach() for part in parts]
        if len({one.dtype for one in values}) > 1:
            values = [one.to(dtype) for one in values]
        value = values[0].new_empty(sum(len(one) for one in values), *values[0].shape[1:])
        expect_large_pages(value)
        for room, one in zip(value.split([len(one) for one in values]), values):
            room.copy_(one)
        if interleaved and kind == "qkv":
            value[:turned] = reordered(value[:turned])
        return value

    input_norm, post_attention_norm = norm(family.input_norm), norm(family.post_attention_norm)
    before = {"qkv": input_norm, "gate_up": post_attention_norm}
    names = {
        "qkv": [f"self_attn.{name}" for name in family.qkv],
        "output": ["self_attn.o_proj"],
        "gate_up": [f"mlp.{name}" for name in family.gate_up],
        "down": ["mlp.down_proj"],
    }
    projections: dict[str, Linear] = {}
    for kind, places in names.items():
        linears = [layer.get_submodule(place) for place in places]
        bias = None
        if any(linear.bias is not None for linear in linears):
            biases = [_zeros_like_output(one.weight) if one.bias is None else one.bias for one in linears]
            bias = fused(kind, biases).to(dtype)
        own = [packed.get(f"model.layers.{index}.{place}") for place in places]
        stored = [weight for weight in own if isinstance(weight, StoredTensor)]
        kept = [weight for weight in own if weight is not None and _keeps_numbers(weight)]
        is_stored = len(stored) == len(own)
        order: Tensor | None = None
        rows_of_whole: Tensor | None = None
        if kind == "qkv" and (is_stored or len(kept) == len(own)):
            count = sum(len(linear.weight) for linear in linears)
            order = fused(kind, [torch.arange(count, device=linears[0].weight.device)])
            rows_of_whole = places_of(order)
        if len(kept) == len(own):
            whole = read_numbers(stored, rows_of_whole) if is_stored else None
            if whole is None:
                known = [weight.quantised() if isinstance(weight, StoredTensor) else weight for weight in kept]
                whole = GroupedWeight.cat(known)
                whole = whole if order is None else whole.reordered(order)
            projections[kind] = grouped_linear(whole, bias, own=True)
            continue
        if is_stored and rounds_while_reading(stored, layout_of(linears[0].weight.new_empty(0, dtype=dtype)), dtype):
            projections[kind] = read_eight_bits(stored, rows_of_whole, bias)
            continue
        if is_stored:
            value = read_floats(stored, rows_of_whole, dtype)
        else:
            value = fused(kind, [_floats(linear.weight, known) for linear, known in zip(linears, own)])
        weight, layout = in_its_layout(value, dtype, layout_of)
        norm_before = before.get(kind)
        factors = None if norm_before is None or layout in COMPACT else norm_before.fold()
        if factors is not None:
            weight.mul_(factors)
        projections[kind] = LAYOUTS[layout](weight, bias)
    return DecoderLayer(
        **projections,
        input_norm=input_norm,
        post_attention_norm=post_attention_norm,
        output_norm=norm(family.output_norm),
        down_norm=norm(family.down_norm),
        query_norm=norm(family.query_norm, of_heads=True),
        key_norm=norm(family.key_norm, of_heads=True),
        sliding_window=family.sliding_window(config, index),
        rotated=family.rotates(config, index),
        interleaved=interleaved,
    )


def _keeps_numbers(weight: GroupedWeight | StoredTensor) -> bool:
    return weight.is_quantised if isinstance(weight, StoredTensor) else True


def _floats(weight: Tensor, known: GroupedWeight | StoredTensor | None) -> Tensor:
    """Return the numbers of a matrix, of which something else than its weight may be known."""
    return weight if known is None else known.values() if isinstance(known, GroupedWeight) else known.tensor()


def in_its_layout(weight: Tensor, dtype: torch.dtype, layout_of: Callable[[Tensor], Layout]) -> tuple[Tensor, Layout]:
    """Return a weight in the dtype that it is computed in, and its layout.

    Our kernels keep 16 bits, bfloat16 where it is exact.
    """
    if weight.dtype in (torch.bfloat16, torch.float16) and layout_of(weight.new_empty(0, dtype=dtype)) == "native":
        return _in_bfloat16(weight), "native"
    weight = weight.to(dtype)
    return weight, layout_of(weight)


def _in_bfloat16(weight: Tensor) -> Tensor:
    """Return a weight of 16 bits as `without_loss` would keep its numbers."""
    return weight.bfloat16() if weight.dtype != torch.bfloat16 and _fits_bfloat16(weight) else weight


def _fits_bfloat16(weight: Tensor) -> bool:
    """Whether bfloat16 holds all its numbers; nearly always the first rows say no. Little more memory is needed for it."""
    step = max(_COMPARED // weight.shape[1], 1)
    return all(torch.equal(some.bfloat16().to(some.dtype), some) for some in weight.split(step))


def _norm(weight: Tensor, config: PreTrainedConfig, dtype: torch.dtype, share: bool) -> RMSNorm:
    weight = weight.detach()
    return RMSNorm(weight if share else weight.to(dtype, copy=True), config.rms_norm_eps, live=share)


def _zeros_like_output(weight: Tensor) -> Tensor:
    """[out], of a weight [out, in]."""
    return weight.detach().new_zeros(weight.shape[0])


def together(parameters: Sequence[Tensor]) -> Tensor:
    """Parameters as consecutive rows of one tensor, of which they become views; the tensor that they are views of already.

    parameters: [rows, ...] each, contiguous or not.
    """
    values = [parameter.detach() for parameter in parameters]
    first = values[0]
    offset = first.storage_offset()
    for value in values:
        same = value.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and value.is_contiguous() and value.storage_offset() == offset):
            break
        offset += value.numel()
    else:
        return first.as_strided((sum(value.shape[0] for value in values), *first.shape[1:]), first.stride())
    rows = torch.cat(values)
    for parameter, own in zip(parameters, rows.split([value.shape[0] for value in values])):
        parameter.data = own
    return rows


def _release(module: nn.Module) -> None:
    """Give the memory of a module's parameters back."""
    for parameter in module.parameters():
        if parameter.is_meta:  # a head that was read from its file
            continue
        parameter.data = torch.empty(0, dtype=parameter.dtype)
