"""A second set of weights to draft with: all layers and the head, rounded to 8 or 4 bits.

A pass through them reads a half or a quarter of what the model's own 16 bits take, so the model can draft for itself whether
or not it was trained to exit early. What is drafted is verified by the model's own weights, so rounding changes no text.
Source: ML-SpecQD (arXiv 2503.13565) drafts with 4-bit casts of a model in the same way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from functools import cache
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
_MOST_READ = 0.9  # of a plain pass's bytes: above it drafts gain little even where all are right (docs/fewer-bits.md)
_HEAD_GAIN = 0.05  # of a plain pass's bytes: if 4 bits save more, the head has them too, and more drafts are wrong
_AUTO_BITS = 8
_ROOM = 3
"""Free memory that must be there, in multiples of the weights' size."""
_USUAL_CACHE = 32 << 20
log = logging.getLogger("selfspec")
_making = fork_safe(threading.Lock())


def draft_bytes(model: LayerSkipModel, bits: int) -> int:
    """Return about how many bytes `drafter` would take: those of the matrices that it rounds."""
    return sum(_bytes_in(*pair) for pair in _matrices(model, bits) if _fewer_bits(*pair))


def draft_share(model: LayerSkipModel, bits: int) -> float:
    """Return about how much of a plain pass's bytes a draft reads."""
    *layers, head = (_bytes_in(*pair) for pair in _matrices(model, bits))
    return (model.num_loops * sum(layers) + head) / _plain_bytes(model)


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
    held = max(_bits_of(linear) for layer in model.loop for linear in layer.linears)
    if held <= bits:
        return f"the model's own weights have {held} bits: there is nothing to gain from drafts in {bits}"
    if (share := draft_share(model, bits)) > _MOST_READ:
        return f"drafts in {bits} bits would read {share:.0%} of what a plain pass reads: too little to gain"
    return None


def drafter(model: LayerSkipModel, bits: int) -> LayerSkipModel:
    """Return the model with its weights rounded to 8 or 4 bits, to draft with. It shares all else with the model.

    Matrices that have no more bits are shared, too. Some rows of a matrix at a time are in float32 while they are rounded.
    Raises ValueError where `why_no_drafter` says why.
    """
    reason = why_no_drafter(model, bits)
    if reason is not None:
        raise ValueError(reason)
    with torch.inference_mode(False), torch.no_grad():
        rounded = [rounded_linear(*pair) for pair in _matrices(model, bits)]
    matrices = iter(rounded)
    layers = [layer.with_linears(lambda linear: next(matrices)) for layer in model.loop]
    return model.with_layers(layers, rounded[-1])


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


def rounded_linear(linear: Linear, bits: int) -> Linear:
    """Round a linear to 8 or 4 bits, unless it has no more.

    Rows have 8 bits beside weights of at most 6, whatever the model's have: no text depends on it.
    """
    fewer = _fewer_bits(linear, bits)
    if fewer is None:
        return with_rows(linear, 8)
    if isinstance(linear, PlainLinear):
        return LAYOUTS[DRAFT_BITS[fewer]](linear.weight.float(), linear.bias)
    assert isinstance(linear, (GroupedLinear, NativeLinear))
    if fewer == 8:
        assert isinstance(linear, NativeLinear)
        return NativeInt8Linear(linear.numbers_in_rows, linear.bias)
    pieces = linear.float_pieces(max(_PIECE // linear.shape[1], 1))  # some outputs at a time are in float32
    rounded = GroupedWeight.cat([round_to_four_bits(piece, group=GROUP) for piece in pieces])
    return grouped_linear(rounded, linear.bias, own=True)


def _matrices(model: LayerSkipModel, bits: int) -> list[tuple[Linear, int]]:
    """Return the matrices that drafts start from, the head last, and the bits that each may have; of all loops once."""
    layers = []
    for index, layer in enumerate(model.loop):
        layers += [(linear, 8 if keeps_eight_bits(index) else bits) for linear in layer.linears]
    head = model.draft_head
    saved = _bytes_in(head, 8) - _bytes_in(head, bits)
    return [*layers, (head, bits if saved > _HEAD_GAIN * _plain_bytes(model) else 8)]


def _plain_bytes(model: LayerSkipModel) -> int:
    return sum(linear.num_bytes for layer in model.layers for linear in layer.linears) + model.head.num_bytes


def _bytes_in(linear: Linear, bits: int) -> int:
    """Return about how many bytes `rounded_linear` reads."""
    (outputs, inputs), fewer = _shape(linear), _fewer_bits(linear, bits)
    if fewer is None:
        return linear.num_bytes
    return outputs * inputs + 4 * outputs if fewer == 8 else outputs * inputs * (GROUP + 4) // (2 * GROUP)


def _fewer_bits(linear: Linear, bits: int) -> int | None:
    """Return in how many bits a linear is rounded to 8 or 4; None if it has no more."""
    fewer = 4 if bits == 4 and fits_four_bits(_shape(linear)[1]) else 8
    return fewer if _bits_of(linear) > fewer else None


def _shape(linear: Linear) -> tuple[int, ...]:
    assert isinstance(linear, (GroupedLinear, NativeLinear, PlainLinear))
    return linear.weight.shape if isinstance(linear, PlainLinear) else linear.shape


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
        "drafts are made with a copy of the weights in %d bits from now on: %d MB, made in %.1f s, "
        "and read %d %% of what plain decoding reads",
        bits,
        draft_bytes(model, bits) // 1_000_000,
        perf_counter() - started,
        100 * draft_share(model, bits),
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
