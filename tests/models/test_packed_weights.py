"""Tensors of a quantised module that do not fit together, or are not what config.json says, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from layerskip_models.checkpoints.packed_weights import dequantise, in_four_bits
from layerskip_models.checkpoints.schemes import NOTHING_SAID, Scheme, schemes_of
from quantised_files import compressed_tensors_settings, pack_rows

ROWS, COLUMNS, GROUPS = 16, 64, 2
Parts = dict[str, Any]


def packed() -> Parts:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator)
    return {
        "weight_packed": pack_rows(values, 4),
        "weight_scale": torch.rand(ROWS, GROUPS, generator=generator).half() + 0.5,
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }


def with_zeros() -> Parts:
    zeros = torch.randint(-8, 8, (ROWS, GROUPS), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    return {**packed(), "weight_zero_point": zeros}


def integers() -> Parts:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (ROWS, COLUMNS), generator=generator).to(torch.int8)
    return {"weight": weight, "weight_scale": torch.rand(ROWS, 1, generator=generator) + 0.5}


def integers_in_groups() -> Parts:
    return {**integers(), "weight_scale": torch.rand(ROWS, GROUPS, generator=torch.Generator().manual_seed(1)) + 0.5}


def gptq() -> Parts:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator)
    return {
        "qweight": pack_rows(values, 4).t().contiguous(),
        "qzeros": pack_rows(torch.full((GROUPS, ROWS), 7), 4),
        "scales": torch.rand(GROUPS, ROWS, generator=generator).half() + 0.5,
        "g_idx": torch.arange(COLUMNS, dtype=torch.int32) // (COLUMNS // GROUPS),
    }


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        parts[name] = change(parts[name])

    return apply


def drop(name: str) -> Callable[[Parts], None]:
    return lambda parts: parts.pop(name)


def at(index: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return change


def with_order(parts: Parts) -> None:
    parts["weight_g_idx"] = torch.tensor([0, 3] * (COLUMNS // 2), dtype=torch.int32)


REFUSED: dict[str, tuple[Callable[[], Parts], Callable[[Parts], object], Scheme, str]] = {
    "zero points of another type": (
        with_zeros, put("weight_zero_point", Tensor.float), NOTHING_SAID, r"zero_point has shape \[16, 2\] of torch\.float32"
    ),
    "zero points of another shape": (
        with_zeros, put("weight_zero_point", lambda z: z[:8]), NOTHING_SAID, r"zero_point has shape \[8, 2\] of torch.int8"
    ),
    "zero points turned round": (
        with_zeros, put("weight_zero_point", lambda z: z.t().contiguous()), NOTHING_SAID, r"zero_point has shape \[2, 16\]"
    ),
    "zero points that 4 bits do not have": (
        with_zeros, put("weight_zero_point", at(3, 8)), NOTHING_SAID, "weight_zero_point holds numbers beyond -8 to 7"
    ),
    "packed zero points of bytes' shape": (
        with_zeros, put("weight_zero_point", Tensor.int), NOTHING_SAID, r"\[16, 2\] of torch\.int32, \[2, 2\] is meant"
    ),
    "scales of blocks": (
        integers, put("weight_scale", lambda s: s[:4].expand(4, 4)), NOTHING_SAID, r"scale has shape \[4, 4\], where 16"
    ),
    "scales of blocks, one block wide": (
        integers, put("weight_scale", lambda s: s[:4]), NOTHING_SAID, r"scale has shape \[4, 1\], where 16"
    ),
    "scales turned round": (
        packed, put("weight_scale", lambda s: s.t().contiguous()), NOTHING_SAID, r"scale has shape \[2, 16\]"
    ),
    "scales of 8-bit floats": (
        packed, put("weight_scale", lambda s: s.to(torch.float8_e4m3fn)), NOTHING_SAID, "is of torch.float8_e4m3fn"
    ),
    "integer scales": (packed, put("weight_scale", Tensor.int), NOTHING_SAID, "weight_scale is of torch.int32"),
    "no zero points where they are said": (
        with_zeros, drop("weight_zero_point"), Scheme(has_zeros=True), "weight_zero_point is missing"
    ),
    "no scales": (gptq, drop("scales"), NOTHING_SAID, "scales is missing"),
    "no shape": (packed, drop("weight_shape"), NOTHING_SAID, "weight_shape is missing"),
    "other outputs": (packed, put("weight_shape", at(0, 8)), NOTHING_SAID, r"16 outputs, and weight_shape is \[8, 64\]"),
    "other inputs": (packed, put("weight_shape", at(1, 56)), NOTHING_SAID, "56 inputs in 8 words"),
    "8-bit floats": (integers, put("weight", lambda w: w.to(torch.float8_e4m3fn)), NOTHING_SAID, "8-bit integers are read"),
    "words of 64 bits": (packed, put("weight_packed", Tensor.long), NOTHING_SAID, "weight_packed is of torch.int64"),
    "another number of groups than is said": (packed, put("weight_scale", Tensor.clone), Scheme(group_size=16), "says 4"),
    "groups where rows are said": (packed, put("weight_scale", Tensor.clone), Scheme(strategy="channel"), "says 1"),
    "rows where one scale is said": (
        integers, put("weight_scale", Tensor.clone), Scheme(strategy="tensor"), "where one number is meant"
    ),
    "other bits than are said": (packed, put("weight_scale", Tensor.clone), Scheme(bits=8), "4 bits, and config.json says 8"),
    "groups that do not divide": (
        packed, put("weight_scale", lambda s: s[:, :1].expand(16, 3)), NOTHING_SAID, "64 inputs are no multiple of 3 groups"
    ),
    "packed groups of which the last is not full": (
        packed, put("weight_scale", Tensor.clone), Scheme(group_size=33), "groups of 33, and 64 inputs are no multiple"
    ),
    "integer groups of which the last is not full": (
        integers_in_groups, put("weight_scale", Tensor.clone), Scheme(group_size=48), "groups of 48, and 64 inputs are no"
    ),
    "an order that is missing": (packed, lambda parts: None, Scheme(reordered=True), "reordered"),
    "a group too many": (packed, with_order, NOTHING_SAID, "an input is of group 3 or 0, but there are 2"),
    "a group below 0": (gptq, put("g_idx", at(5, -1)), NOTHING_SAID, "of group 1 or -1"),
    "an order of floats": (gptq, put("g_idx", Tensor.float), NOTHING_SAID, "g_idx has shape"),
    "too few in order": (gptq, put("g_idx", lambda g: g[:32]), NOTHING_SAID, "neither 4 nor 8 bits"),
    "gptq zeros of bytes": (gptq, put("qzeros", lambda z: z.to(torch.int8)), NOTHING_SAID, "qzeros is of torch.int8"),
    "gptq zeros of fewer groups": (gptq, put("qzeros", lambda z: z[:1]), NOTHING_SAID, "qzeros has 1 groups, and scales"),
    "gptq scales of fewer outputs": (gptq, put("scales", lambda s: s[:, :8]), NOTHING_SAID, r"scales has shape \[8, 2\]"),
    "gptq of other bits": (gptq, put("g_idx", Tensor.clone), Scheme(bits=8), "not 8 bits"),
    "another shape than the model's": (packed, put("weight_scale", Tensor.clone), Scheme(shape=(16, 32)), "does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    made, change, scheme, message = REFUSED[name]
    dequantise(made())
    parts = made()
    change(parts)
    for read in (dequantise, in_four_bits):
        with pytest.raises(ValueError, match=message):
            read(parts, scheme=scheme)


def test_zero_points_of_bytes_are_those_that_are_packed() -> None:
    parts = with_zeros()
    words = pack_rows((parts["weight_zero_point"].int() + 8).t(), 4).t().contiguous()
    assert torch.equal(dequantise(parts), dequantise({**parts, "weight_zero_point": words}))
    kept = in_four_bits(parts)
    assert kept is not None and torch.equal(kept.values(), dequantise(parts))


def test_a_last_group_that_is_not_full() -> None:
    """What is said decides: 64 inputs of GPTQ with two scales are groups of 32, or of 48 and 16."""
    parts = gptq()
    del parts["g_idx"]
    ones = {**parts, "scales": torch.ones(2, ROWS)}
    values = dequantise(ones)
    for scheme, size in ((NOTHING_SAID, 32), (Scheme(group_size=48), 48)):
        scale = parts["scales"].float()[torch.arange(COLUMNS) // size].t()
        assert torch.equal(dequantise(parts, scheme=scheme), values * scale)
        assert (in_four_bits(parts, scheme=scheme) is None) == (size == 48)


def test_modules_are_told_apart_as_compressed_tensors_does() -> None:
    """By name before pattern before class."""
    groups = {
        name: {"targets": [target], "weights": {"num_bits": 4, "group_size": size, "strategy": "group"}}
        for name, target, size in (("a", "Linear", 32), ("b", r"re:.*down_proj$", 64), ("c", "model.x.down_proj", 128))
    }
    scheme_of = schemes_of({**compressed_tensors_settings(), "config_groups": groups})
    found = [scheme_of(module).group_size for module in ("model.up_proj", "model.y.down_proj", "model.x.down_proj")]
    assert found == [32, 64, 128]
