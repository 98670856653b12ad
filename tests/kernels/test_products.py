"""Products of a matrix of any kind and rows: near those in float64, and each row's the same in any company.

A linear's product is a property of (kind, shape, rows, threads, variant), tried in one place; whole passes in
`test_many_rows`, attention in `test_native_attention`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exact_rooms import exact_rooms
from layerskip_models.checkpoints.gguf_blocks import GROUPED, numbers_of_blocks
from layerskip_models.grouped_weight import GroupedWeight, pack_nibbles
from layerskip_models.kernels.native_linear import (
    MAX_ROWS,
    NativeGroupedLinear,
    NativeInt8Linear,
    NativeLinear,
    operators_only,
)
from layerskip_models.kernels.threads import on_threads
from layerskip_models.norm import RMSNorm
from test_native import drawn, every_variant, needs_native, use

MIXTURES = ("Q4_K, Q6_K", "Q4_0, Q8_0")
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NIBBLES = {
    f"int4 {size}{', offsets' * offsets}": (size, offsets) for size in (32, 64, 128) for offsets in (False, True)
}
KINDS = (*FLOATS, "int8", *NIBBLES, *GROUPED, *MIXTURES)


def weight_of(form: str, rows: int, columns: int, seed: int = 0) -> GroupedWeight:
    """Random numbers with scales of about the same size, of one or several forms of GGUF files, a part of the rows each."""
    kinds = form.split(", ")
    if len(kinds) > 1:
        sizes = rows - rows // 3, rows // 3
        return GroupedWeight.cat([weight_of(kind, sizes[k], columns, k) for k, kind in enumerate(kinds)])
    kept, rng = GROUPED[form], np.random.default_rng(seed)
    inputs = 256 if kept.in_blocks else 32
    data = rng.integers(0, 256, (rows, columns // inputs, kept.block_bytes), np.uint8)
    scales = (rng.random((rows, columns // inputs, 2)) + 0.5).astype(np.float16) / (2000 if kept.in_blocks else 100)
    count = 1 if kept.offsets is None else 2
    place = kept.block_bytes - 2 if form == "Q6_K" else 0
    data[..., place : place + 2 * count] = scales[..., :count].astype(np.float16).view(np.uint8)
    return numbers_of_blocks(torch.from_numpy(data).flatten(1), form)


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


def linear_of(kind: str, outputs: int, inputs: int, seed: int, bias: bool, bits: int | None = None) -> NativeLinear:
    """Inputs must be a multiple of 256 but for floats and int8. bits: of rows that meet groups."""
    shift = drawn(outputs, seed=seed + 5) if bias else None
    if kind in NIBBLES:
        weight = drawn_weight(outputs, inputs, *NIBBLES[kind], factors=seed % 2 == 1, seed=seed)
        return NativeGroupedLinear(weight, shift, rows=bits)
    if kind not in FLOATS and kind != "int8":
        return NativeGroupedLinear(weight_of(kind, outputs, inputs, seed), shift, rows=bits)
    weight = drawn(outputs, inputs, seed=seed)
    return NativeInt8Linear(weight, shift) if kind == "int8" else NativeLinear(weight.to(FLOATS[kind]), shift)


@needs_native
@every_variant
@given(
    kind=st.sampled_from(KINDS),
    outputs=st.one_of(st.integers(3, 70), st.sampled_from((32, 64, 96, 300))),
    inputs=st.one_of(st.integers(1, 90), st.sampled_from((700, 1601))),
    blocks=st.integers(1, 3),
    rows=st.one_of(st.integers(1, 20), st.integers(21, 140)),
    threads=st.sampled_from([1, 2, 3]),
    bias=st.booleans(),
    outliers=st.booleans(),
    bits=st.sampled_from((8, 16)),
    seed=st.integers(0, 999),
)
@settings(max_examples=80)
@example(
    kind="float32", outputs=37, inputs=4096, blocks=16, rows=70, threads=3, bias=False, outliers=False, bits=16, seed=0
)
@example(
    kind="bfloat16", outputs=37, inputs=4096, blocks=16, rows=70, threads=2, bias=False, outliers=False, bits=16, seed=0
)
@example(kind="int8", outputs=37, inputs=4096, blocks=16, rows=70, threads=3, bias=True, outliers=True, bits=16, seed=0)
@example(kind="int4 32", outputs=37, inputs=0, blocks=16, rows=70, threads=2, bias=True, outliers=True, bits=16, seed=0)
@example(
    kind="float32", outputs=1031, inputs=40, blocks=1, rows=2 * MAX_ROWS, threads=2, bias=True, outliers=False, bits=16,
    seed=1,
)  # fmt: skip
@example(kind="Q4_K", outputs=64, inputs=0, blocks=16, rows=130, threads=2, bias=True, outliers=True, bits=8, seed=0)
def test_a_row_has_its_product_in_any_company(
    variant: str, kind: str, outputs: int, inputs: int, blocks: int, rows: int, threads: int, bias: bool, outliers: bool,
    bits: int, seed: int,
) -> None:  # fmt: skip
    """Alone on one thread, and beside others on several, where 70 rows of 4,096 numbers go through in batches.

    So are what is added to, the product of normalised rows, and the head's choice among such a product's outputs.
    """
    inputs = inputs if kind in (*FLOATS, "int8") else 256 * blocks
    with use(variant):
        linear = linear_of(kind, outputs, inputs, seed, bias, bits)
    x, residual = drawn(rows, inputs, seed=seed + 1), drawn(rows, outputs, seed=seed + 2)
    if outliers:
        x[::3, seed % inputs] *= 1e4  # these rows get finer limbs
    norm = RMSNorm(1 + 0.1 * drawn(inputs, seed=seed + 3), 1e-5)
    calls = (
        linear,
        lambda part: linear.add_to(residual[: len(part)] * 0 + 1, part),
        partial(linear.of_normalised, norm),
        lambda part: linear.choices_of_normalised(norm, part, "all").numbers.t(),
    )
    for call in calls:
        with on_threads(1):
            alone = torch.cat([call(row) for row in x.split(1)])
        with on_threads(threads), exact_rooms():
            for _ in range(2):  # from its second call on, a team prepares rows together
                assert torch.equal(call(x), alone)
            some = 1 + seed % rows
            assert torch.equal(call(x[:some]), alone[:some])
    assert_near(linear, x)


def rounded_rows(x: Tensor) -> Tensor:
    """Rows whose 32 neighbours become whole numbers of 8 bits times a factor, float64."""
    groups = x.unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    factor = torch.where(largest < 2.0**-120, 0, torch.tensor(127.0) / largest)  # rounded once: 127 / largest is not
    return ((groups * factor).round().double() * (largest / 127)).flatten(1)


def assert_near(linear: NativeLinear, x: Tensor) -> None:
    """The product in float64, as far as the rows are not cut to 16 bits before they meet weights in groups."""
    shift, weight = linear.bias, linear.weight.double()
    added = 0 if shift is None else shift.double()
    exact, size = x.double() @ weight.T + added, x.abs().double() @ weight.abs().T + 1
    cut = isinstance(linear, NativeGroupedLinear)
    by = 2e-4 if cut else 1e-5
    if isinstance(linear, NativeGroupedLinear) and cut and linear.row_bits == 8:
        exact, by = rounded_rows(x) @ weight.T + added, 2e-6
        size = x.abs().sum(1, keepdim=True) * weight.abs().max() + 1  # a number and its offset may cancel
    assert bool(((linear(x) - exact).abs() <= by * size).all())
    with operators_only():
        assert bool(((linear(x) - exact).abs() <= 1e-5 * size).all())
    norm = RMSNorm(torch.ones(x.shape[1]), 1e-5)
    choices, logits = linear.choices_of_normalised(norm, x, "all"), linear.of_normalised(norm, x)
    assert torch.equal(choices.tokens, logits.argmax(-1)) and torch.equal(choices.logits, logits.amax(-1))
    p = logits.double().softmax(-1)
    torch.testing.assert_close(choices.confidences.double(), p.amax(-1), rtol=1e-4, atol=0)
    torch.testing.assert_close(choices.entropies.double(), torch.special.entr(p).sum(-1), rtol=1e-4, atol=1e-5)
