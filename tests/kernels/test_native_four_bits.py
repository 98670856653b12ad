"""4-bit weights on our own kernels: the product is what the numbers say, and a row is the same in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip_models import from_transformers
from layerskip_models.four_bit_rounding import round_to_four_bits
from layerskip_models.grouped_weight import GroupedWeight, pack_nibbles
from layerskip_models.kernels.native_grouped import NativeGroupedLinear
from layerskip_models.kernels.native_linear import MOST_ROWS, operators_only
from layerskip_models.kv_cache import KVCache
from layerskip_models.norm import RMSNorm
from test_four_bits import drawn, wide
from test_integer_rows import CUT_ROWS
from test_native import every_variant, needs_native, use

KINDS = [(size, offsets) for size in (32, 64, 128) for offsets in (False, True)]


def drawn_weight(outputs: int, inputs: int, group: int, offsets: bool, factors: bool, seed: int = 0) -> GroupedWeight:
    """Numbers of all sizes, not only those that rounding leaves."""
    values = torch.randint(0, 16, (outputs, inputs), generator=torch.Generator().manual_seed(seed))
    groups = (0.1 * drawn(outputs, inputs // group, seed=seed + 1)).half()
    return GroupedWeight(
        pack_nibbles(values),
        groups,
        0.5 * drawn(outputs, inputs // group, seed=seed + 2) if offsets else None,
        torch.ldexp(torch.ones(outputs), torch.arange(outputs) % 4 - 2) if factors else None,
    )


@needs_native
@every_variant
@given(
    seed=st.integers(0, 999),
    rows=st.one_of(st.integers(1, 20), st.integers(1, 140)),
    chunks=st.integers(1, 9),
    outputs=st.one_of(st.integers(1, 70), st.sampled_from((32, 64, 96))),
    kind=st.sampled_from(KINDS),
    factors=st.booleans(),
    bias=st.booleans(),
)
@settings(max_examples=60)
def test_the_product_is_what_the_numbers_say(
    variant: str, seed: int, rows: int, chunks: int, outputs: int, kind: tuple[int, bool], factors: bool, bias: bool
) -> None:
    group, offsets = kind
    inputs = 64 * chunks if group < 128 else 128 * chunks
    weight = drawn_weight(outputs, inputs, group, offsets, factors, seed)
    x, residual = drawn(rows, inputs, seed=seed + 3), drawn(rows, outputs, seed=seed + 4)
    shift = drawn(outputs, seed=seed + 5) if bias else None
    with use(variant):
        linear = NativeGroupedLinear(weight, shift)
    assert torch.equal(linear.weight, weight.values()) and linear.shape == (outputs, inputs)
    exact = F.linear(x.double(), weight.values().double(), None if shift is None else shift.double())
    largest = 1 + float(exact.abs().max())
    bound = {
        "rtol": 0,
        "atol": (2e-4 if variant in CUT_ROWS else 2e-5) * largest,
    }
    torch.testing.assert_close(linear(x).double(), exact, **bound)
    torch.testing.assert_close(linear.add_to(residual, x).double(), exact + residual, **bound)
    norm = RMSNorm(1 + 0.1 * drawn(inputs, seed=seed + 6), 1e-5)
    torch.testing.assert_close(linear.of_normalised(norm, x), linear(norm(x)), rtol=0, atol=2e-4 * largest)
    with operators_only():
        torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=2e-5 * largest)


@needs_native
@every_variant
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("inputs", [128, 1664])
@pytest.mark.parametrize("outputs", [37, 96])
@pytest.mark.parametrize("kind", KINDS[::3])
def test_a_row_is_the_same_in_any_company_and_on_any_threads(
    variant: str, threads: int, inputs: int, outputs: int, kind: tuple[int, bool]
) -> None:
    group, offsets = kind
    weight, x = drawn_weight(outputs, inputs, group, offsets, False), drawn(20, inputs, seed=9)
    with use(variant):
        linear = NativeGroupedLinear(weight)
    alone = torch.cat([linear(row) for row in x.split(1)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 5, 6, 7, 13, 20):
            assert torch.equal(linear(x[:rows]), alone[:rows])
        many = x.repeat(2 * MOST_ROWS // len(x), 1)
        assert torch.equal(linear(many), alone.repeat(len(many) // len(x), 1))
    finally:
        torch.set_num_threads(before)


@needs_native
@every_variant
def test_layers_are_those_of_operators(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same 4-bit numbers in a pass of one call, and layer by layer on PyTorch's operators, biases included."""
    options: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "max_position_embeddings": 256}
    with use(variant):
        model = from_transformers(wide(**options), layout="int4")
    assert model.kernels == variant
    tokens = torch.arange(MOST_ROWS + 9) % 24
    with torch.inference_mode():
        one = KVCache(model, len(tokens))
        alone = torch.cat([model.run_layers(model.embed(token), 0, 3, one) for token in tokens.split(1)])
        many = KVCache(model, len(tokens))
        together = torch.cat([model.run_layers(model.embed(part), 0, 3, many) for part in tokens.split(50)])
        assert torch.equal(together, alone) and torch.equal(one.keys, many.keys)
        monkeypatch.setattr(model, "backend", model.operators)
        with operators_only():
            other = model.run_layers(model.embed(tokens), 0, 3, KVCache(model, len(tokens)))
    torch.testing.assert_close(alone, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@needs_native
def test_not_a_number_is_not_lost() -> None:
    for outputs in (9, 32):
        weight = round_to_four_bits(drawn(outputs, 128), group=32, symmetric=True)
        weight.groups[3, 1] = float("nan")
        linear = NativeGroupedLinear(weight)
        x = drawn(7, 128)
        for rows in (1, 7):
            assert linear(x[:rows]).isnan().any(0).tolist() == [output == 3 for output in range(outputs)]
        x[2, 5] = float("nan")
        assert linear(x).isnan().all(1).tolist() == [row == 2 for row in range(7)]


@needs_native
def test_memory_that_is_not_contiguous() -> None:
    x = drawn(3, 128)
    for outputs in (8, 32):
        weight = drawn_weight(outputs, 128, 32, True, False)
        turned = GroupedWeight(weight.packed, weight.groups.t().contiguous().t(), weight.offsets)
        room = torch.empty(weight.packed.numel() + 1, dtype=torch.uint8)
        room[1:] = weight.packed.flatten()
        strange = GroupedWeight(room[1:].view_as(weight.packed), weight.groups, weight.offsets)  # at an odd address
        for other in (turned, strange):
            assert torch.equal(NativeGroupedLinear(other)(x), NativeGroupedLinear(weight)(x))
