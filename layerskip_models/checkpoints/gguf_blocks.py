"""The types of GGUF files whose numbers our layout of weights in groups holds, every one of them exactly.

A row of such a tensor is blocks of 32 inputs, or of 256 for types that end in K, with float16 numbers d and m.
Of 32 inputs: Q4_0 has d and 16 bytes, byte j with input j in its low and input 16 + j in its high four bits; a number q
stands for d (q - 8). Q4_1 has d, m and the bytes; q stands for d q + m. Q5_0 and Q5_1 have 32 bits before the bytes, bit i
the fifth bit of input i; a number q of Q5_0 stands for d (q - 16). Q8_0 has d and 32 signed bytes. IQ4_NL has d and 16 bytes,
whose four bits choose one of 16 signed bytes.
Of 256 inputs: Q4_K has d, m and for each of eight groups a scale s and a minimum t of six bits; q stands for d s q - m t.
Q5_K has a fifth bit for each number. Q6_K has numbers of six bits, a signed byte s for each 16 of them, and d; q stands for
d s (q - 32).

Source: gguf's `quants.py` and `constants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip_models.grouped_weight import BLOCK, CHUNK, GroupedWeight, pack_nibbles, pack_sixes
from layerskip_models.kernels import library
from layerskip_models.kernels.library import KINDS
from layerskip_models.kernels.pages import expect_large_pages
from layerskip_models.kernels.weights import LANES, in_shares

_NAMES = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K IQ4_NL"
_STORED = {name: kind for kind, name in enumerate(_NAMES.split(), start=3)}
"""`enum Stored` of stored.h: types that the native library reads."""
_PIECE = 1 << 18  # numbers that gguf converts at a time
IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class Form:
    """How a type is kept.

    read: makes our layout of blocks in the file, uint8 [out, blocks, block_bytes], by PyTorch's operators. bits: 4, 6 or 8
    here. group: inputs that share a scale. scales, offsets: dtypes.
    zero: the number that stands for 0 if there are no offsets. in_blocks: whether scales are multiplied by a block's.
    """

    read: Callable[[Tensor, Form], GroupedWeight]
    block_bytes: int
    bits: int
    scales: torch.dtype = torch.float16
    offsets: torch.dtype | None = None
    group: int = 32
    zero: int = 8
    in_blocks: bool = False


def keeps_form(form: str, columns: int, bits: int) -> bool:
    """Return whether a matrix of this form can keep its numbers. columns: its inputs. bits: of a kept number, at most."""
    kept = GROUPED.get(form)
    return kept is not None and kept.bits <= bits and columns % (BLOCK if kept.in_blocks else CHUNK) == 0


def kept_rows(
    parts: Sequence[Tensor], form: str, order: Tensor | None = None, *, interleave: bool = False
) -> GroupedWeight | None:
    """Convert tensors' bytes, uint8 [rows, bytes of a row] each, to rows of one weight; None if a scale is not finite.

    form: one of `GROUPED`. order: which of all rows is first, second and so on; None for theirs. interleave: whether to put
    16 outputs side by side at once, where the kernels want that.
    """
    kernels = library.kernels()
    if kernels is None:
        rows = torch.cat([*parts])
        made = numbers_of_blocks(rows if order is None else rows[order], form).contiguous()
        return made if made.is_finite() else None
    places = _places(parts, order)
    made = _room(len(places), parts[0].shape[1], form)
    outputs, inputs = made.shape
    made = replace(made, interleaved=interleave and outputs % LANES == 0)
    targets = made.packed, made.groups, made.offsets, made.blocks
    for target in targets:
        if target is not None:
            expect_large_pages(target)
    run = kernels.block_rows

    def some(share: range) -> bool:
        first = (None if target is None else target[share.start :].data_ptr() for target in targets)
        width = made.packed.shape[1]
        scratch = torch.empty(LANES * width, dtype=torch.uint8, device="cpu")
        to = byref(library.Blocks(*first)), width, scratch.data_ptr() if made.interleaved else None
        return bool(run(_STORED[form], places[share.start :].data_ptr(), len(share), inputs, *to))

    return made if in_shares(made.packed, some, step=LANES) else None


def float_rows(rows: Tensor, form: str, order: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Convert a tensor's bytes to floats [out, in], or bfloat16 for these rounded; None if one is not finite."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    block, width = GGML_QUANT_SIZES[GGMLQuantizationType[form]]
    made = torch.empty(len(rows), rows.shape[1] // width * block, dtype=dtype, device="cpu")
    kernels = library.kernels()
    if kernels is None or form not in _STORED:
        step = max(_PIECE // made.shape[1], 1)
        for piece, room in zip((rows if order is None else rows[order]).split(step), made.split(step)):
            room.copy_(torch.from_numpy(dequantize(piece.numpy().copy(), GGMLQuantizationType[form])))
        return made if bool(made.isfinite().all()) else None
    places, run = _places([rows], order), kernels.float_rows
    expect_large_pages(made)

    def some(share: range) -> bool:
        row = torch.empty(made.shape[1], dtype=torch.float32, device="cpu")
        read = places[share.start :].data_ptr(), len(share), made.shape[1], KINDS[dtype]
        return bool(run(_STORED[form], *read, row.data_ptr(), made[share.start :].data_ptr()))

    return made if in_shares(made, some) else None


def _places(parts: Sequence[Tensor], order: Tensor | None) -> Tensor:
    """Return the addresses of all rows, int64. order: as in `kept_rows`."""
    found = [part.data_ptr() + part.shape[1] * torch.arange(len(part), device="cpu") for part in parts]
    places = torch.cat(found)
    return places if order is None else places[order]


def _room(count: int, row_bytes: int, form: str) -> GroupedWeight:
    """Make room for the numbers of `count` rows, in our layout."""
    kept = GROUPED[form]
    columns = row_bytes // kept.block_bytes * (BLOCK if kept.in_blocks else 32)

    def room(width: int, dtype: torch.dtype, *more: int) -> Tensor:
        return torch.empty(count, width, *more, dtype=dtype, device="cpu")

    return GroupedWeight(
        room(columns * kept.bits // 8, torch.uint8),
        room(columns // kept.group, kept.scales),
        None if kept.offsets is None else room(columns // kept.group, kept.offsets),
        blocks=room(columns // BLOCK, torch.float16, 1 if kept.offsets is None else 2) if kept.in_blocks else None,
        bits=kept.bits,
        zero=kept.zero,
    )


def numbers_of_blocks(data: Tensor, form: str) -> GroupedWeight:
    """Convert a tensor's bytes, uint8 [out, bytes of a row], of a form of `GROUPED`, by PyTorch's operators."""
    kept = GROUPED[form]
    return kept.read(data.unflatten(1, (-1, kept.block_bytes)), kept)


def _halves(blocks: Tensor) -> Tensor:
    """float16 numbers, [out, blocks, numbers]."""
    return blocks.contiguous().view(torch.float16)


def _nibbles(blocks: Tensor) -> Tensor:
    """Return the low four bits of all bytes, then the high ones."""
    return torch.cat((blocks & 15, blocks >> 4), dim=2)


def _of_four_bits(blocks: Tensor, form: Form) -> GroupedWeight:
    halves = _halves(blocks[..., :-16])
    offsets = halves[..., 1].float().contiguous() if form.offsets is not None else None
    return GroupedWeight(pack_nibbles(_nibbles(blocks[..., -16:]).flatten(1)), halves[..., 0].contiguous(), offsets)


def _of_five_bits(blocks: Tensor, form: Form) -> GroupedWeight:
    halves = _halves(blocks[..., :-20])
    offsets = halves[..., 1].float().contiguous() if form.offsets is not None else None
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., -20:-16].unsqueeze(3) >> places & 1).flatten(2)
    numbers = pack_sixes((_nibbles(blocks[..., -16:]) | high << 4).flatten(1))
    return GroupedWeight(numbers, halves[..., 0].contiguous(), offsets, bits=form.bits, zero=form.zero)


def _of_bytes(blocks: Tensor, form: Form) -> GroupedWeight:
    numbers = blocks[..., 2:] ^ 128
    return GroupedWeight(numbers.flatten(1), _halves(blocks[..., :2]).flatten(1), bits=8, zero=form.zero)


def _of_chosen_bytes(blocks: Tensor, form: Form) -> GroupedWeight:
    chosen = torch.tensor(IQ4_NUMBERS, device=blocks.device) + form.zero
    numbers = chosen.to(torch.uint8)[_nibbles(blocks[..., 2:]).long()]
    return GroupedWeight(numbers.flatten(1), _halves(blocks[..., :2]).flatten(1), bits=8, zero=form.zero)


def _of_k_blocks(blocks: Tensor, form: Form) -> GroupedWeight:
    first, second, mixed = blocks[..., 4:16].split(4, dim=2)
    scales = torch.cat((first & 63, (mixed & 15) | (first >> 2 & 48)), dim=2).flatten(1)
    offsets = torch.cat((second & 63, (mixed >> 4) | (second >> 2 & 48)), dim=2).flatten(1)
    low = blocks[..., -128:]  # 32 bytes are the low and then the high four bits of 64 neighbours, as they are here
    if form.bits == 4:
        return GroupedWeight(low.flatten(1), scales, offsets, blocks=_halves(blocks[..., :4]))
    numbers = torch.stack((low.unflatten(2, (4, 32)) & 15, low.unflatten(2, (4, 32)) >> 4), dim=3).flatten(2, 3)
    high = blocks[..., 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1) & 1
    numbers = pack_sixes((numbers | high << 4).flatten(1))
    return GroupedWeight(numbers, scales, offsets, blocks=_halves(blocks[..., :4]), bits=form.bits)


def _of_six_bits(blocks: Tensor, form: Form) -> GroupedWeight:
    low = blocks[..., :128].unflatten(2, (2, 1, 64))
    high = blocks[..., 128:192].unflatten(2, (2, 1, 32))
    low = torch.cat((low & 15, low >> 4), dim=3)  # [.., half, 2 * parts, 64]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    high = (high >> shifts & 3).flatten(3).unflatten(3, (2, 64))
    numbers = (low | high << 4).flatten(1)
    return GroupedWeight(
        pack_sixes(numbers),
        blocks[..., 192:208].view(torch.int8).flatten(1),
        blocks=_halves(blocks[..., 208:]),
        bits=form.bits,
        zero=form.zero,
    )


GROUPED = {
    "Q4_0": Form(_of_four_bits, 18, 4),
    "Q4_1": Form(_of_four_bits, 20, 4, offsets=torch.float32),
    "Q4_K": Form(_of_k_blocks, 144, 4, torch.uint8, torch.uint8, in_blocks=True),
    "Q5_0": Form(_of_five_bits, 22, 6, zero=16),
    "Q5_1": Form(_of_five_bits, 24, 6, offsets=torch.float32),
    "Q5_K": Form(_of_k_blocks, 176, 6, torch.uint8, torch.uint8, in_blocks=True),
    "Q6_K": Form(_of_six_bits, 210, 6, torch.int8, group=16, zero=32, in_blocks=True),
    "Q8_0": Form(_of_bytes, 34, 8, zero=128),
    "IQ4_NL": Form(_of_chosen_bytes, 18, 8, zero=128),
}
"""Types whose numbers are kept."""
