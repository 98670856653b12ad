"""Weights of 4 bits: where each number lies, what is kept exactly, rounding, and the product with and without kernels."""

from __future__ import annotations

import itertools
from ctypes import addressof
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.models import open_model
from decoding import default_dtype
from layerskip_models import DEMO_PATH, from_transformers, load_model
from layerskip_models.checkpoints import loading
from layerskip_models.four_bit_rounding import fits_four_bits, round_to_four_bits
from layerskip_models.grouped_weight import GroupedWeight, grouped_product, pack_nibbles, unpack_nibbles
from layerskip_models.kernels import library, weights
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear, NativeLinear
from layerskip_models.norm import RMSNorm
from selfspec import SelfSpecGenerator
from test_native import CPU, RUNNABLE, drawn
from tiny_llama import tiny_llama


def numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed))


def test_where_each_number_lies() -> None:
    # Input 0 is in the low four bits of byte 0, input 32 in its high ones; input 64 begins the next 32 bytes.
    values = torch.zeros(1, 128, dtype=torch.int64)
    values[0, 0], values[0, 32], values[0, 33], values[0, 64] = 5, 10, 1, 15
    packed = pack_nibbles(values)
    assert packed.shape == (1, 64) and packed.dtype == torch.uint8
    assert packed[0, 0] == 10 * 16 + 5 and packed[0, 1] == 16 and packed[0, 32] == 15
    assert torch.equal(unpack_nibbles(packed).long(), values)


def test_by_hand() -> None:
    # Group 0 has scale 0.5 and group 1 scale 2: with an offset of -1 and a factor of 4, 3 stands for (0.5 * 3 - 1) * 4 = 2.
    values = torch.full((1, 64), 3)
    groups = torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    plain = GroupedWeight(pack_nibbles(values), groups)
    assert plain.values()[0, 31:33].tolist() == [-2.5, -10.0]
    shifted = GroupedWeight(pack_nibbles(values), groups, torch.tensor([[-1.0, 0.0]]), torch.tensor([4.0]))
    assert shifted.values()[0, 31:33].tolist() == [2.0, 24.0]
    assert (plain.group, plain.shape, plain.num_bytes, shifted.num_bytes) == (32, (1, 64), 36, 48)
    both = GroupedWeight.cat([plain, shifted])
    assert torch.equal(both.values(), torch.cat([plain.values(), shifted.values()]))
    assert torch.equal(both.values(1, 2), shifted.values())


@given(seed=st.integers(0, 99), size=st.sampled_from([32, 64, 128]), offsets=st.booleans(), factors=st.booleans())
@settings(max_examples=40)
def test_outputs_of_several_weights_as_one_in_another_order(seed: int, size: int, offsets: bool, factors: bool) -> None:
    scale, values = drawn(5, 384 // size, seed=seed).half(), numbers(5, 384, seed=seed + 1)
    shift = drawn(5, 384 // size, seed=seed + 2) if offsets else -8 * scale.float()
    factor = torch.exp2(numbers(5, 1, seed=seed + 3) - 8.0) if factors else torch.ones(5, 1)
    weight = GroupedWeight(
        pack_nibbles(values), scale, shift if offsets else None, factor.flatten() if factors else None
    )
    meant = values.unflatten(1, (-1, size)) * scale.float().unsqueeze(2) + shift.unsqueeze(2)
    assert torch.equal(weight.values(), meant.flatten(1) * factor)
    assert weight.group == size
    other = round_to_four_bits(meant.flatten(1), group=32)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    both = GroupedWeight.cat([weight, other]).reordered(order)
    assert torch.equal(both.values(), torch.cat([weight.values(), other.values()])[order])


def test_what_cannot_be_kept() -> None:
    values = numbers(4, 64)
    packed, fit = pack_nibbles(values), drawn(4, 2).half()
    for groups, blocks, message in (
        (fit.double(), None, "do not fit together"),
        (numbers(4, 2).to(torch.uint8), None, "do not fit together"),  # integers, and nothing that multiplies them
        (fit, drawn(4, 1, 1).half(), "do not fit together"),
        (drawn(4, 8).half(), None, "groups must be of 128 or 64 or 32"),
    ):
        with pytest.raises(ValueError, match=message):
            GroupedWeight(packed, groups, blocks=blocks)
    with pytest.raises(ValueError, match="a multiple of 64 inputs, got 96"):
        round_to_four_bits(drawn(4, 96), group=32)
    assert fits_four_bits(192) and not fits_four_bits(96)


def test_rounding() -> None:
    """Closer than rounding to nearest, and closer with smaller groups; at any size of the numbers."""
    weight = drawn(40, 384)

    def error(group: int, size: float = 1.0) -> float:
        found = round_to_four_bits(weight * size, group=group)
        assert found.group == group and found.offsets is None
        return float((found.values() / size - weight).norm() / weight.norm())

    groups = weight.unflatten(1, (-1, 32))
    step = groups.abs().amax(2, keepdim=True) / 7
    nearest = float(((groups / step).round() * step - groups).norm() / weight.norm())
    assert error(32) < 0.97 * nearest
    assert error(32) < error(64) < error(128)
    for size in (1e-9, 1e9):
        assert error(64, size) == pytest.approx(error(64), rel=1e-3)


def test_rounding_of_odd_numbers() -> None:
    """Zeros and equal numbers stay what they are, and NaN stays NaN where it was."""
    weight = drawn(4, 64)
    weight[0], weight[1], weight[2, 40] = 0.0, 2.5, float("nan")
    found = round_to_four_bits(weight, group=32).values()
    assert torch.equal(found[:2], weight[:2])
    assert found[2].isnan().tolist() == [False] * 32 + [True] * 32 and not found[3].isnan().any()


@pytest.mark.parametrize("variant", RUNNABLE)
def test_every_variant_rounds_to_the_operators_bits(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and groups of zeros, rows far from 1, groups far apart in a row; on one thread and on several."""
    monkeypatch.setattr(weights, "_SHARE", 1000)
    for columns in (64, 576):  # fewer groups than a vector has lanes, and a number that is no multiple of them
        weight = drawn(23, columns)
        weight[1], weight[2, :32], weight[4] = 0, 0, weight[4] * 1e-20
        weight[3] *= torch.logspace(-30, 3, columns)
        for dtype, group in itertools.product((torch.float32, torch.bfloat16, torch.float16), (32, 64, 128)):
            made = []
            for kernels in (lambda: library.load(variant), lambda: None):
                monkeypatch.setattr(library, "kernels", kernels)
                made.append(round_to_four_bits(weight.to(dtype), group=group))
            for ours, theirs in zip(made[0].tensors, made[1].tensors):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
            assert (made[0].factors is None) == (dtype == torch.float16)  # which does not hold the smallest row


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_a_default_dtype_changes_nothing(default: torch.dtype) -> None:
    """Nor small and large numbers, whose factors float16 does not hold."""
    weight, packed = drawn(6, 128) * 1e-20, pack_nibbles(numbers(6, 128))
    parts = packed, drawn(6, 2).half(), drawn(6, 2, seed=1), torch.full((6,), 1e-12)

    def made() -> tuple[Tensor, ...]:
        found = round_to_four_bits(weight, group=32)
        kept = GroupedWeight(*parts)
        x = torch.ones(2, 128, dtype=torch.float32)
        both = GroupedWeight.cat([kept, found])
        return (*(one.values() for one in (found, kept, both)), grouped_product(x, kept, None))

    expected = made()
    with default_dtype(default):
        for one, other in zip(made(), expected):
            assert one.dtype == torch.float32 and torch.equal(one, other) and bool((one != 0).any())


def test_pieces_of_a_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = round_to_four_bits(drawn(50, 64), group=32), drawn(3, 64, seed=1)
    whole = grouped_product(x, weight, None)
    monkeypatch.setattr("layerskip_models.grouped_weight._CONVERTED", 64 * 7)
    torch.testing.assert_close(grouped_product(x, weight, None), whole)


@pytest.mark.skipif(not native_works(CPU, torch.float32), reason="needs the native kernels")
@pytest.mark.parametrize("inner", [8, 37, 72])
@pytest.mark.parametrize("bits", [8, 16])
def test_ups_that_begin_within_16_outputs_and_outputs_that_do_not_fill_them(inner: int, bits: int) -> None:
    chosen, norm, x = library.kernels(), RMSNorm(torch.ones(128), 1e-5), drawn(20, 128)
    assert chosen is not None and norm.factors is not None
    weight = round_to_four_bits(drawn(2 * inner, 128, seed=1), group=32)
    gate_up, down = NativeGroupedLinear(weight, rows=bits), NativeLinear(drawn(128, inner))
    assert gate_up.shape == weight.shape and torch.equal(gate_up.weight, weight.values())
    adapter = library.AdapterWeights(gate_up.matrix, down.matrix, norm.factors.data_ptr())
    for rows in (1, 3, 20):
        gated, y = torch.empty(rows, inner), torch.empty(rows, 128)
        chosen.adapt(addressof(adapter), norm.eps, x.data_ptr(), rows, gated.data_ptr(), y.data_ptr(), 1)
        gates, ups = gate_up.of_normalised(norm, x[:rows]).split(inner, dim=1)
        torch.testing.assert_close(gated, torch.nn.functional.silu(gates) * ups)


def test_a_weight_whose_rows_are_looked_up_multiplies_nothing() -> None:
    weight = round_to_four_bits(drawn(32, 64), group=32)
    if native_works(CPU, torch.float32):
        kept = NativeGroupedLinear(weight, reorder=False)
        assert torch.equal(kept.rows(torch.tensor([5, 31])), weight.values()[[5, 31]])
        with pytest.raises(TypeError, match="its rows can be looked up, and nothing else"):
            kept(drawn(1, 64))


def wide(**options: Any) -> Any:
    """With inputs in whole groups, so that all its matrices can be of 4 bits."""
    shape = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
    return tiny_llama(**{**shape, "num_layers": 3, "seed": 4, "late_scale": 0.6, **options})


def test_odd_widths_get_8_bits() -> None:
    """Of a matrix whose inputs are no multiple of 64; the others keep their 4 bits."""
    model = from_transformers(wide(hidden_size=96), layout="int4")
    eight = from_transformers(wide(hidden_size=96), layout="int8")
    last, other = model.layers[-1], eight.layers[-1]
    assert last.qkv.num_bytes == other.qkv.num_bytes and last.gate_up.num_bytes == other.gate_up.num_bytes
    assert last.down.num_bytes < 0.6 * other.down.num_bytes
    new = SelfSpecGenerator(model, policy="ls:1-3").generate([3, 1, 4], max_new_tokens=12).new_tokens
    assert new == SelfSpecGenerator(model, policy="ar").generate([3, 1, 4], max_new_tokens=12).new_tokens


def test_int4_by_name() -> None:
    """A checkpoint, and synthetic weights, whose first layer of twelve has 8 bits."""
    synthetic = open_model("synthetic:small", "int4", "cpu")
    assert 0.55 < synthetic.layer_bytes / synthetic.layer_weights < 0.64
    model = load_model(DEMO_PATH, dtype="int4", device="cpu", local_files_only=True)
    eight = load_model(DEMO_PATH, dtype="int8", device="cpu", local_files_only=True)
    assert model.layer_bytes < 0.6 * eight.layer_bytes and model.head_bytes == eight.head_bytes
    assert isinstance(from_transformers(wide(), layout="int4").head, NativeInt8Linear) == native_works(
        CPU, torch.float32
    )
    with pytest.raises(ValueError, match=r"int4 weights are this engine's own.*use float32"):
        loading.resolve_dtype("int4", CPU, None)
    with pytest.raises(ValueError, match="layout 'int4' needs a CPU"):
        load_model(DEMO_PATH, dtype="int4", device="meta", local_files_only=True)
