"""The Triton kernels beside plain formulas, and a row beside itself in other company.

On a CPU Triton's interpreter runs them, which takes a minute or two: `make test-triton` installs Triton and runs these.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interpreted_triton import DEVICE, DOT_DTYPES, triton_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter
FLOATS = [torch.float32, torch.bfloat16]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def lines(rows: int) -> Tensor:
    return torch.zeros(rows, triton_rows.COLUMNS, dtype=torch.int64, device=DEVICE)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    gap = (found.double() - expected.double()).norm() / expected.double().norm()
    assert gap < (2e-5 if dtype == torch.float32 else 1.5e-2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_its_norm_and_who_asked_for_it(dtype: torch.dtype) -> None:
    x, delta, weight = (rand(*shape, dtype=dtype) for shape in ((3, 96), (3, 96), (96,)))
    table, states, seen = lines(3), torch.zeros_like(x), torch.zeros(4, 3, 96, dtype=dtype, device=DEVICE)
    for row in range(3):
        table[row, triton_rows.HIDDEN] = states[row].data_ptr()
    table[1, triton_rows.SEEN], table[1, triton_rows.SEEN_STRIDE] = seen[0, 1].data_ptr(), seen.stride(0)
    total, normed = triton_rows.add_norm(x, delta, (weight, 1e-5), table, 3, keep=True)
    expected = x + delta
    near(total, expected, dtype)
    near(normed, weight * F.rms_norm(expected.float(), (96,), eps=1e-5).to(dtype), dtype)
    assert torch.equal(states, total)
    assert torch.equal(seen[2, 1], total[1])
    assert not seen[:2].any()
    assert not seen[2, 0].any()
    assert torch.equal(triton_rows.load_rows(table, torch.empty_like(x)), states)


@pytest.mark.parametrize("half", [16, 8, 0], ids=["whole", "part", "none"])
def test_rotation_and_where_keys_and_values_go(half: int) -> None:
    """Rows of three texts, in caches of two lengths; a head of which all numbers, the first half or none turn."""
    heads, kv_heads, dim, positions, layer = 4, 2, 32, (7, 8, 39), 2
    qkv, table, caches = rand(3, heads + 2 * kv_heads, dim), lines(3), []
    before = qkv.clone()
    for row, length in enumerate((40, 24, 40)):
        keys, values = (torch.zeros(5, kv_heads, length, dim, device=DEVICE) for _ in range(2))
        caches.append((keys, values))
        table[row, triton_rows.POSITION], table[row, triton_rows.LENGTH] = positions[row], length
        table[row, triton_rows.KEYS], table[row, triton_rows.VALUES] = keys.data_ptr(), values.data_ptr()
    angles = torch.outer(torch.arange(40.0), 1e4 ** -(torch.arange(max(half, 1)) / max(half, 1))).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()
    rotary = torch.cat((cos, cos, -sin, sin), dim=1) if half else None
    query = triton_rows.rotate_and_store(qkv, table, rotary, layer, heads)
    for row, (keys, values) in enumerate(caches):
        place, turned = positions[row], before[row].clone()
        first, second = before[row, :-kv_heads, :half], before[row, :-kv_heads, half : 2 * half]
        if half:
            turned[:-kv_heads, :half] = first * cos[place] - second * sin[place]
            turned[:-kv_heads, half : 2 * half] = second * cos[place] + first * sin[place]
        near(query[row], turned[:heads])
        near(keys[layer, :, place], turned[heads:-kv_heads])
        assert torch.equal(values[layer, :, place], before[row, -kv_heads:])
        assert not keys[layer - 1].any()
        assert not values[layer, :, :place].any()


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_sees_the_row_s_own_text_up_to_itself(
    window: int | None, heads: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies after a row is NaN here, as a draft that overflowed may leave it."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_rows, "PARTS", 4)
    dim, positions, table, caches = 32, (150, 3, 149), lines(3), []
    query = rand(3, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    for row, length in enumerate((200, 64, 150)):
        keys, values = (rand(3, kv_heads, length, dim, dtype=dtype) for _ in range(2))
        for stored in (keys, values):
            stored[:, :, positions[row] + 1 :] = float("nan")
        caches.append((keys, values))
        table[row, triton_rows.POSITION], table[row, triton_rows.LENGTH] = positions[row], length
        table[row, triton_rows.KEYS], table[row, triton_rows.VALUES] = keys.data_ptr(), values.data_ptr()
    found = triton_rows.attend(query, table, 1, kv_heads, window)
    for row, (keys, values) in enumerate(caches):
        first = 0 if window is None else max(0, positions[row] - window + 1)
        seen = [
            stored[1, :, first : positions[row] + 1].double().repeat_interleave(heads // kv_heads, 0)
            for stored in (keys, values)
        ]
        weights = (torch.einsum("hd,hnd->hn", query[row].double(), seen[0]) * dim**-0.5).softmax(-1)
        near(found[row].view(heads, dim), torch.einsum("hn,hnd->hd", weights, seen[1]), dtype)
    alone = triton_rows.attend(query[1:2], table[1:2].contiguous(), 1, kv_heads, window)
    assert torch.equal(alone[0], found[1])


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_the_same_for_a_row_in_any_company(biased: bool, dtype: torch.dtype) -> None:
    x, weight, bias = rand(17, 200, dtype=dtype), rand(70, 200, dtype=dtype), rand(70, dtype=dtype) if biased else None
    found = [triton_rows.product(x[:rows].contiguous(), weight, bias) for rows in (1, 5, 17)]
    near(found[-1], F.linear(x.float(), weight.float(), None if bias is None else bias.float()), dtype)
    for fewer, more in pairwise(found):
        assert torch.equal(fewer, more[: len(fewer)])
    assert torch.equal(triton_rows.product(x[-1:].contiguous(), weight, bias)[0], found[-1][-1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = rand(3, 2 * 1100, dtype=dtype)
    gate, up = gate_up.float().chunk(2, -1)
    near(triton_rows.silu_mul(gate_up), F.silu(gate) * up, dtype)


def test_the_first_of_the_largest_logits_wins_and_nan_is_told() -> None:
    logits = rand(3, 3000)
    logits[1, 77] = logits[1, 2500] = 9.0
    logits[2, 5] = float("nan")
    tokens, largest, confidences = triton_rows.choose(logits)
    assert tokens[:2].tolist() == [int(logits[0].argmax()), 77]
    assert largest[:2].tolist() == logits[:2].amax(-1).tolist()
    near(confidences[:2], logits[:2].softmax(-1).amax(-1))
    assert largest[2].isnan()
