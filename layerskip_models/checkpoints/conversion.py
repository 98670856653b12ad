"""From weights, wherever they are, to a `LayerSkipModel`: matrices are fused, reordered and laid out, layer by layer.

A matrix is in memory once as it was loaded and once as it stays, and no more than one layer's matrices are at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerskip_models.checkpoints.finite import copy_finite, not_finite
from layerskip_models.checkpoints.parameters import EMBEDDING, HEAD, NORM, gate_shapes, parameter_shapes
from layerskip_models.checkpoints.supported import check_transformers
from layerskip_models.checkpoints.weights import ModuleWeights, Weights
from layerskip_models.decoder_layer import DecoderLayer, Linear, interleave_heads
from layerskip_models.families import family_of, head_dim_of
from layerskip_models.grouped_weight import GroupedLinear, GroupedWeight
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_linear import NativeInt8Linear, NativeLinear
from layerskip_models.kernels.pages import expect_large_pages
from layerskip_models.kernels.threads import SingleThreadedOperators
from layerskip_models.linear import (
    COMPACT,
    LAYOUTS,
    Layout,
    PlainLinear,
    check_layout,
    grouped_linear,
    keeps_eight_bits,
)
from layerskip_models.model import Embedding, LayerSkipModel
from layerskip_models.norm import RMSNorm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT_HEAD_BYTES = 16 << 20
"""Heads from this size on get a second one in 8 bits, which drafts are chosen with: smaller ones stay in a cache."""
_COMPARED = 1 << 20  # numbers at a time
_SMALL = 1 << 22  # numbers of a matrix that one thread has copied before others have begun
_HALVES = (torch.bfloat16, torch.float16)
_listener: ContextVar[Callable[[int, int], object] | None] = ContextVar("loading_progress", default=None)


@contextmanager
def telling(listener: Callable[[int, int], object]) -> Iterator[None]:
    """Within it, models that are built call the listener with (layers done, layers in all) after every layer."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def arithmetic_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that a model with weights of this dtype is computed in: float32 on a CPU for weights of 16 bits.

    PyTorch's products of 16-bit matrices on a CPU depend on how many rows they have, so that a text would depend on how it
    was drafted. In float32 it depends on the model and the prompt. Elsewhere a model is computed in its own dtype.
    """
    return torch.float32 if device.type == "cpu" and weights in _HALVES else weights


def from_transformers(
    model: PreTrainedModel, *, layout: Layout | None = None, release: bool = False, share: bool = False
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
    weight = model.model.norm.weight
    dtype, device = weight.dtype, weight.device
    weights = ModuleWeights(model, config, release=release)
    made = build_model(weights, dtype=dtype, layout="plain" if share else layout, device=device, share=share)
    if release:
        for parameter in model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
    return made


def why_not_shared(model: PreTrainedModel, layout: Layout | None = None) -> str | None:
    """Return why this model's weights cannot be shared in that layout; None if they can."""
    weight = model.model.norm.weight
    kept = arithmetic_dtype(weight.dtype, weight.device) == weight.dtype
    if not kept or (layout != "plain" and weight.device.type == "cpu"):
        return "only weights kept as they are can be shared: on CUDA, or on a CPU in float32 or float64, layout='plain'"
    if any(parameter.is_inference() for parameter in model.parameters()):
        return "weights made in inference mode cannot be shared: load the model outside of it"
    return None


def build_model(
    weights: Weights,
    *,
    dtype: torch.dtype,
    layout: Layout | None,
    device: torch.device | Mapping[str, torch.device],
    share: bool = False,
    keep_bits: int = 0,
    rounded: list[str] | None = None,
) -> LayerSkipModel:
    """Load every weight and build a model of them.

    dtype: that weights are rounded to. layout: of matrices; None for the fastest lossless one. device: of everything, or of
    each module by its name. share: as in `from_transformers`. keep_bits: quantised matrices of layers keep their
    file's own numbers if these have at most this many bits; the head keeps its own only if this is 8. rounded: is given the
    names of parameters that would keep their numbers and cannot.
    """
    config: Any = weights.config
    names = ["model.embed_tokens", "lm_head", *(f"model.layers.{index}" for index in range(config.num_hidden_layers))]
    home, last, *devices = (device[name] if isinstance(device, Mapping) else device for name in names)
    small = config.hidden_size * config.intermediate_size <= _SMALL
    alone = SingleThreadedOperators() if small or keep_bits else nullcontext()  # kept numbers have threads of their own
    with torch.inference_mode(False), torch.no_grad(), alone:
        computed = arithmetic_dtype(dtype, last)
        if layout is not None:
            check_layout(layout, torch.empty(0, dtype=computed, device=last))
        builder = LayerBuilder(weights, dtype=dtype, computed=computed, layout=layout, share=share, keep_bits=keep_bits)
        builder.rounded = [] if rounded is None else rounded
        with torch.device("cpu"):  # which slows every operator down, and is for transformers' own here
            frequencies, scaling = weights.rotary()
        inv_freq = _checked(frequencies.to(home), config)
        embedding, head, draft_head = builder.ends(home, last)
        final_norm = builder.norm(NORM, last)
        layers, listener = [], _listener.get()
        for index, place in enumerate(devices):
            layers.append(builder.layer(index, place, rotated=2 * inv_freq.numel()))
            if listener is not None:
                listener(index + 1, len(devices))
        family = family_of(config)
        if family.loop_norm(config):
            layers[0] = replace(layers[0], entry_norm=final_norm)
        return LayerSkipModel(
            config,
            dtype=computed,
            weights_dtype=computed if layout in ("int8", "int4") else dtype,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=head,
            draft_head=draft_head,
            inv_freq=inv_freq,
            rotary_scaling=scaling,
            generation_config=copy.deepcopy(weights.generation_config),
            name=config.name_or_path or None,
            num_loops=family.loops(config),
            gate=builder.gate(),
        )


def _checked(inv_freq: Tensor, config: Any) -> Tensor:
    """Return rotary frequencies, [numbers that rotate / 2]. Raises ValueError for NaN, and where part of a head rotates."""
    size, rotated = head_dim_of(config), 2 * inv_freq.numel()
    if not bool(inv_freq.isfinite().all()):
        raise ValueError(f"the rotary frequencies are NaN or infinite: rope_parameters is {config.rope_parameters}")
    if rotated > size or (rotated < size and not family_of(config).rotates_part):
        raise ValueError(f"rope_parameters rotate {rotated} of {size} numbers of a head, unlike {config.model_type}")
    return inv_freq


def interleaves(device: torch.device) -> bool:
    """Return whether heads are interleaved there: complex numbers are slow on CUDA, and cannot be compiled."""
    return device.type == "cpu"


@dataclass(slots=True, eq=False)
class LayerBuilder:
    """Builds the parts of one model. dtype: that weights are rounded to. computed: the dtype of the arithmetic.

    layout, share, keep_bits, rounded: as in `build_model`.
    """

    weights: Weights
    dtype: torch.dtype
    computed: torch.dtype
    layout: Layout | None
    share: bool = False
    keep_bits: int = 0
    rounded: list[str] = field(default_factory=list)
    _shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._shapes = parameter_shapes(self.weights.config)

    def layer(self, index: int, device: torch.device, *, rotated: int) -> DecoderLayer:
        """Build a layer. rotated: how many numbers of a head rotate, its first ones."""
        config: Any = self.weights.config
        family, prefix = family_of(config), f"model.layers.{index}."
        turns = rotated if interleaves(device) and not self.share else None

        def norm(name: str | None, *, of_heads: bool = False) -> RMSNorm | None:
            if name is None:
                return None
            place = f"{prefix}self_attn." if of_heads else prefix
            return self.norm(f"{place}{name}.weight", device, turns=turns if of_heads else None)

        def linear(*names: str, **options: Any) -> Linear:
            return self.linear([prefix + name for name in names], device, index, **options)

        input_norm, post_attention_norm = norm(family.input_norm), norm(family.post_attention_norm)
        return DecoderLayer(
            input_norm=input_norm,
            qkv=linear(*(f"self_attn.{name}" for name in family.qkv), before=input_norm, turns=turns),
            output=linear("self_attn.o_proj"),
            post_attention_norm=post_attention_norm,
            gate_up=linear(*(f"mlp.{name}" for name in family.gate_up), before=post_attention_norm),
            down=linear("mlp.down_proj"),
            output_norm=norm(family.output_norm),
            down_norm=norm(family.down_norm),
            query_norm=norm(family.query_norm, of_heads=True),
            key_norm=norm(family.key_norm, of_heads=True),
            sliding_window=family.sliding_window(config, index),
            rotated=family.rotates(config, index),
            interleaved=turns is not None,
        )

    def ends(self, home: torch.device, last: torch.device) -> tuple[Embedding, Linear, Linear | None]:
        """Build the embedding, the head (the same if tied and in its own numbers), and another head for drafts, or None."""
        tied = HEAD not in self.weights.names()
        name, layout = EMBEDDING if tied else HEAD, self._layout(last, None)
        kept = self._kept([name], last, self.keep_bits if self.keep_bits == 8 else 0)
        head: Linear
        draft_head: Linear | None = None
        weight = torch.empty(0, device="cpu")
        if kept is not None:
            head = grouped_linear(kept, own=True)
        else:
            weight = self._in_layout(self._floats([name], last), layout)
            head = LAYOUTS[layout](weight, None)
            if layout == "native" and head.num_bytes >= DRAFT_HEAD_BYTES:
                draft_head = NativeInt8Linear(weight)
        if tied and (kept is not None or layout in ("plain", "native")):
            assert isinstance(head, (PlainLinear, NativeLinear, GroupedLinear))
            return head.weight if isinstance(head, PlainLinear) else head, head, draft_head
        if home.type == "cpu" and self.dtype == torch.float32:
            own = self.weights.kept([EMBEDDING], 8)
            if own is not None:
                return grouped_linear(own, own=True, reorder=False), head, draft_head
        embedding = weight if tied else self._floats([EMBEDDING], home)
        if layout not in COMPACT:
            embedding = embedding.to(self.dtype)
        elif embedding.dtype == self.computed and _fits_bfloat16(embedding):
            embedding = embedding.bfloat16()
        return embedding, head, draft_head

    def gate(self) -> Tensor | None:
        """Load the gate that the checkpoint may hold, float32 [hidden + 1], its bias last."""
        names = gate_shapes(self.weights.config)
        if not names or not names.keys() <= {*self.weights.names()}:
            return None
        return torch.cat([self.weights.load(name).float().flatten() for name in names])

    def norm(self, name: str, device: torch.device, *, turns: int | None = None) -> RMSNorm:
        """Build a norm. turns: how many numbers of each head are interleaved; None leaves the order as it is."""
        weight = self._floats([name], device).to(self.dtype)
        if turns is not None:
            weight = interleave_heads(weight, len(weight) // head_dim_of(self.weights.config), turns)
        return RMSNorm(weight.to(self.computed), self.weights.config.rms_norm_eps, live=self.share)

    def linear(
        self,
        modules: Sequence[str],
        device: torch.device,
        layer: int,
        *,
        before: RMSNorm | None = None,
        turns: int | None = None,
    ) -> Linear:
        """Fuse linears to one. before: the norm of its inputs. turns: as in `norm`, of queries and keys."""
        weights, biases = ([f"{module}.{kind}" for module in modules] for kind in ("weight", "bias"))
        order = None if turns is None else self._order(weights, turns)
        bias: Tensor | None = None
        if any(name in self.weights.names() for name in biases):
            bias = self._floats(biases, device, order).to(self.computed)
        kept = self._kept(weights, device, self.keep_bits, order)
        if kept is not None:
            return grouped_linear(kept, bias, own=True)
        layout = self._layout(device, layer)
        weight = self._in_layout(self._floats(weights, device, order), layout)
        factors = None if before is None or layout in COMPACT else before.fold()
        if factors is not None:
            weight.mul_(factors)
        return LAYOUTS[layout](weight, bias)

    def _order(self, names: Sequence[str], turns: int) -> Tensor:
        """Return which row of queries, keys and values comes first, second and so on. turns: as in `norm`."""
        config: Any = self.weights.config
        heads = config.num_attention_heads + config.num_key_value_heads
        order = torch.arange(sum(map(self._num_rows, names)), device="cpu")
        turned = heads * head_dim_of(config)
        order[:turned] = interleave_heads(order[:turned], heads, turns)
        return order

    def _kept(
        self, names: Sequence[str], device: torch.device, bits: int, order: Tensor | None = None
    ) -> GroupedWeight | None:
        """Load parameters as rows of one with the file's own numbers; None where not all of them can keep these."""
        if not bits:
            return None
        kept = self.weights.kept(names, bits, order, interleave=native_works(device, torch.float32))
        if kept is None:
            self.rounded += names
        return kept

    def _floats(self, names: Sequence[str], device: torch.device, order: Tensor | None = None) -> Tensor:
        """Load parameters as rows of a new tensor; of one that they become views of if they are shared.

        order: which of the rows is first, second and so on; None for theirs. Raises ValueError for numbers that are not
        finite, and names the first of such parameters.
        """
        if self.share:
            return together([self._load(name, device) for name in names])
        total = sum(map(self._num_rows, names))
        places = torch.arange(total, device="cpu") if order is None else order.argsort()
        room, filled = torch.empty(0, device="cpu"), 0
        for name in names:  # one by one, since some are converted to float32 when they are loaded
            part, rows = self._load(name, device), self._num_rows(name)
            # On a CPU 16 bits that become float32 stay 16 bits for now.
            stays = part.dtype in _HALVES and self.dtype == torch.float32 and device.type == "cpu"
            dtype = part.dtype if stays else self.dtype
            if (
                len(names) == 1
                and self.weights.gives(name)
                and part.dtype == dtype
                and part.device == device
                and order is None
            ):
                return part.contiguous()
            if not filled:
                room = torch.empty(len(places), *part.shape[1:], dtype=dtype, device=device)
                expect_large_pages(room)
            elif dtype != room.dtype:
                room = room.to(self.computed)
            finite = copy_finite(part, room, places[filled : filled + rows], checks=self.weights.checkpoint is not None)
            if not finite:
                raise not_finite(str(self.weights.checkpoint), name)
            filled += rows
        return room

    def _load(self, name: str, device: torch.device) -> Tensor:
        """Load a parameter as floats. A bias that some of several fused linears lack is zeros."""
        if name.endswith(".bias") and name not in self.weights.names():
            return torch.zeros(self._num_rows(name), dtype=self.dtype, device=device)
        return self.weights.load(name, self.dtype)

    def _num_rows(self, name: str) -> int:
        """Return how many rows a parameter has; a bias has as many numbers as its weight has rows."""
        return self._shapes[name.replace(".bias", ".weight")][0]

    def _layout(self, device: torch.device, layer: int | None) -> Layout:
        """Return the layout of a layer's matrices; of the head for None."""
        if self.layout == "int4" and keeps_eight_bits(layer):
            return "int8"
        return self.layout or ("native" if native_works(device, self.computed) else "plain")

    def _in_layout(self, weight: Tensor, layout: Layout) -> Tensor:
        """Return a weight in the dtype that a layout is made from. Our kernels read 16 bits, best bfloat16."""
        if layout == "native" and weight.dtype == torch.float16 and _fits_bfloat16(weight):
            return weight.bfloat16()
        return weight if layout in COMPACT and weight.dtype in _HALVES else weight.to(self.computed)


def _fits_bfloat16(weight: Tensor) -> bool:
    """Return whether bfloat16 holds all its numbers. Nearly always the first rows say no; little memory is needed."""
    step = max(_COMPARED // weight.shape[1], 1)
    return all(torch.equal(some.bfloat16().to(some.dtype), some) for some in weight.split(step))


def together(parameters: Sequence[Tensor]) -> Tensor:
    """Make parameters, [rows, ...], views of one tensor's consecutive rows; the tensor that they are views of already."""
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
