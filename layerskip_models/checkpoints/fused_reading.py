"""Matrices that lie in files, read as the rows of one: each goes from its file to where it stays.

places, in all of these: the row of the whole for each row of the parts, int64; None for their own order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip_models.checkpoints.gguf_blocks import room_for_numbers
from layerskip_models.checkpoints.stored_tensor import StoredTensor
from layerskip_models.grouped_weight import GroupedWeight
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_linear import NativeInt8Linear
from layerskip_models.kernels.pages import expect_large_pages
from layerskip_models.linear import Layout


def read_floats(parts: Sequence[StoredTensor], places: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Their numbers, [out, in], in the dtype that all of them are meant to have; else in `dtype`."""
    meant = {part.dtype for part in parts}
    room = torch.empty(*_shape(parts), dtype=meant.pop() if len(meant) == 1 else dtype, device="cpu")
    expect_large_pages(room)
    _each(parts, places, (room,), lambda part, rooms, own: part.into(rooms[0], own))
    return room


def rounds_while_reading(parts: Sequence[StoredTensor], layout: Layout, dtype: torch.dtype) -> bool:
    """Whether `read_eight_bits` makes what this layout is, of numbers that are computed with in `dtype`."""
    exact = all(part.is_exact or part.dtype == dtype for part in parts)
    return layout == "int8" and exact and native_works(torch.device("cpu"), dtype)


def read_eight_bits(parts: Sequence[StoredTensor], places: Tensor | None, bias: Tensor | None) -> NativeInt8Linear:
    """Read the numbers as what `NativeInt8Linear` makes of them, bit for bit."""
    rounded = torch.empty(_shape(parts), dtype=torch.int8, device="cpu")
    scales = torch.empty(len(rounded), dtype=torch.float32, device="cpu")
    expect_large_pages(rounded)
    _each(parts, places, (rounded, scales), lambda part, rooms, own: part.eight_bits_into(rooms[0], rooms[1], own))
    return NativeInt8Linear.of_rounded(rounded, scales, bias)


def read_numbers(parts: Sequence[StoredTensor], places: Tensor | None) -> GroupedWeight | None:
    """Their own numbers; None for parts of several forms."""
    if len({part.form for part in parts}) > 1:
        return None
    room = room_for_numbers(*_shape(parts), parts[0].form)
    for tensor in room.tensors:
        if tensor is not None:
            expect_large_pages(tensor)
    _each(parts, places, room.tensors, lambda part, rooms, own: part.read_quantised_into(room.with_tensors(rooms), own))
    return room


def places_of(order: Tensor) -> Tensor:
    """Where each row goes, of an order that says which row is taken for each place."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _shape(parts: Sequence[StoredTensor]) -> tuple[int, int]:
    return sum(part.rows for part in parts), parts[0].columns


def _each(
    parts: Sequence[StoredTensor],
    places: Tensor | None,
    rooms: Sequence[Tensor | None],
    read: Callable[[StoredTensor, Sequence[Any], Tensor | None], None],
) -> None:
    """Read every part: into its own rows, or where `places` says. A room that there is not stays None."""
    first = 0
    for part in parts:
        last = first + part.rows
        if places is None or torch.equal(places[first:last].sort().values, torch.arange(first, last)):
            own = None if places is None else places[first:last] - first
            read(part, [None if room is None else room[first:last] for room in rooms], own)
        else:
            read(part, rooms, places[first:last])
        first = last
