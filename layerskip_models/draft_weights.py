"""A second set of weights to draft with: all layers and the head, rounded to 8 or 4 bits.

A pass through them reads a half or a quarter of what the model's own 16 bits take, so the model can draft for itself whether
or not it was trained to exit early. What is drafted is verified by the model's own weights, so rounding changes no text.
Source: ML-SpecQD (arXiv 2503.13565) drafts with 4-bit casts of a model in the same way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Literal, get_args

import psutil
import torch

from layerskip_models.decoder_layer import Linear
from layerskip_models.fork_safe import fork_safe
from layerskip_models.four_bit_rounding import fits_four_bits, round_to_four_bits
from layerskip_models.grouped_weight import GroupedLinear, GroupedWeight
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear, NativeLinear
from layerskip_models.linear import (
    EIGHT_BIT_LAYERS,
    GROUP,
    LAYOUTS,
    Layout,
    PlainLinear,
    check_layout,
    grouped_linear,
    keeps_eight_bits,
    with_rows,
)
from layerskip_models.model import LayerSkipModel

DRAFT_BITS: dict[int, Layout] = {8: "int8", 4: "int4"}
"""The numbers of bits that drafts can be made in, and the layout of each."""
DraftWeights = Literal["auto", "none", "int8", "int4"]
"""auto: in 8 bits, once the default policy wants them, if they are read from memory and there is room. none: never. int8,
int4: from the start."""
_PIECE = 1 << 22  # numbers that are in float32 at a time
_AUTO_BITS = 8
_ROOM = 3
"""Free memory that must be there, in multiples of the weights' size."""
_USUAL_CACHE = 32 << 20
log = logging.getLogger("selfspec")
_making = fork_safe(threading.Lock())


def draft_bytes(model: LayerSkipModel, bits: int) -> int:
    """About how many bytes `drafter` would take."""
    head = model.hidden_size * model.vocab_size
    in_eight = EIGHT_BIT_LAYERS if bits == 4 else model.num_layers
    scales = 0.5 / 8  # of 4 bits: a scale of 16 bits for 32 weights
    layers = in_eight + (model.num_layers - in_eight) * (0.5 + scales)
    return int(layers * model.layer_weights + (0 if _keeps_head(model) else head))


def why_no_drafter(model: LayerSkipModel, bits: int) -> str | None:
    """Return why this model cannot draft in so many bits; None if it can."""
    if bits not in DRAFT_BITS:
        return f"drafts can be made in {' or '.join(map(str, DRAFT_BITS))} bits, not in {bits}"
    if len(set(model.layer_devices)) > 1:
        return "drafts in fewer bits need the whole model on one device"
    try:
        check_layout(DRAFT_BITS[bits], torch.empty(0, dtype=model.dtype, device=model.device))
    except ValueError as error:
        return f"drafts in fewer bits do not run here: {error}"
    held = min(_bits_of(linear) for layer in model.layers for linear in layer.linears)
    if held <= bits:
        return f"the model's own weights have {held} bits: there is nothing to gain from drafts in {bits}"
    return None


def drafter(model: LayerSkipModel, bits: int) -> LayerSkipModel:
    """Return the model with its weights rounded to 8 or 4 bits, to draft with. It shares all else with the model.

    Some rows of a matrix at a time are in float32 while they are rounded. Raises ValueError where `why_no_drafter` says why.
    """
    reason = why_no_drafter(model, bits)
    if reason is not None:
        raise ValueError(reason)
    with torch.inference_mode(False), torch.no_grad():
        layers = [
            layer.with_linears(partial(rounded_linear, layout=DRAFT_BITS[bits], layer=index))
            for index, layer in enumerate(model.layers)
        ]
        head = model.draft_head if _keeps_head(model) else rounded_linear(model.draft_head, DRAFT_BITS[bits], None)
    return model.with_layers(layers, head)


def drafter_of(model: LayerSkipModel, bits: int) -> LayerSkipModel:
    """Return the model's drafter, made when it is first asked for. Any thread may ask. Raises as `drafter`."""
    found = model.drafters.get(bits)
    if found is None:
        with _making:
            found = model.drafters.get(bits)
            if found is None:
                found = drafter(model, bits)
                found.prepare(model.rotary.shape[0])
                model.drafters[bits] = found
    return found


def _keeps_head(model: LayerSkipModel) -> bool:
    """Return whether rounded drafts are chosen with the head that the model has: one of 8 bits or fewer."""
    return _bits_of(model.draft_head) <= 8


def rounded_linear(linear: Linear, layout: Layout, layer: int | None) -> Linear:
    """Round a linear to the layout's bits, unless it has no more. layer: that it belongs to, or None for the head.

    Rows have 8 bits beside weights of at most 6, whatever the model's have: no text depends on it.
    """
    in_four = layout == "int4" and not keeps_eight_bits(layer)
    if _bits_of(linear) <= (4 if in_four else 8):
        return with_rows(linear, 8)
    if isinstance(linear, (GroupedLinear, NativeGroupedLinear, NativeInt8Linear)):
        # Of 6 or 8 bits; some outputs at a time are in float32.
        pieces = linear.float_pieces(max(_PIECE // linear.shape[1], 1))
        rounded = [round_to_four_bits(piece, group=GROUP) for piece in pieces]
        return grouped_linear(GroupedWeight.cat(rounded), linear.bias, own=True)
    if isinstance(linear, NativeLinear):
        weight = linear.numbers_in_rows
        if in_four and fits_four_bits(weight.shape[1]):
            return grouped_linear(round_to_four_bits(weight, group=GROUP), linear.bias, own=True)
        return NativeInt8Linear(weight, linear.bias)
    assert isinstance(linear, PlainLinear)
    return LAYOUTS["int4" if in_four else "int8"](linear.weight.float(), linear.bias)


def _bits_of(linear: Linear) -> int:
    """Of a weight as it is stored."""
    if isinstance(linear, (GroupedLinear, NativeGroupedLinear)):
        return linear.bits
    assert isinstance(linear, (NativeLinear, PlainLinear))
    return 8 * (linear.stored if isinstance(linear, NativeLinear) else linear.weight).element_size()


# Who gets one


def check_draft_weights(choice: str) -> DraftWeights:
    """Return the choice. Raises ValueError for anything else than the names."""
    for known in get_args(DraftWeights):
        if choice == known:
            return known
    raise ValueError(f"draft_weights must be one of {', '.join(get_args(DraftWeights))}, got {choice!r}")


def make_draft_weights(model: LayerSkipModel, choice: DraftWeights) -> None:
    """Make what was asked for by name. Raises ValueError where it cannot be made."""
    if choice in ("int8", "int4"):
        drafter_of(model, 8 if choice == "int8" else 4)


def make_for(model: LayerSkipModel, choice: DraftWeights, policy: str, observed: Iterable[int]) -> None:
    """Make the weights that a policy drafts with. observed: the policy's bits.

    Raises ValueError for what `draft_weights` does not allow, and where it does not run.
    """
    for bits in observed:
        if choice not in ("auto", f"int{bits}"):
            raise ValueError(f"policy {policy!r} drafts in {bits} bits, and draft_weights is {choice!r}")
        drafter_of(model, bits)


def bits_on_offer(model: LayerSkipModel, choice: DraftWeights) -> tuple[int, ...]:
    """In which bits weights to draft with may be made for a policy that has not asked for any yet."""
    if choice != "auto" or model.drafters:
        return ()
    size = draft_bytes(model, _AUTO_BITS)
    if size < last_cache() or why_no_drafter(model, _AUTO_BITS) is not None or not _is_room_for(size):
        return ()
    return (_AUTO_BITS,)


def make_offered(model: LayerSkipModel, bits: int) -> None:
    """Make the weights that a plan wants to draft with and that are not there; says so in the log, with their size."""
    started = perf_counter()
    drafter_of(model, bits)
    log.info(
        "drafts are made with a copy of the weights in %d bits from now on: %d MB, made in %.1f s",
        bits,
        draft_bytes(model, bits) // 1_000_000,
        perf_counter() - started,
    )


def _is_room_for(size: int) -> bool:
    return int(psutil.virtual_memory().available) >= _ROOM * size


@cache
def last_cache() -> int:
    """Bytes of the processor's last cache. What fits in it is not read from memory, so fewer bits gain little."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
        except (OSError, ValueError):
            continue
    return max(sizes, default=_USUAL_CACHE)
