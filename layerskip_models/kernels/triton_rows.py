"""Triton kernels for passes over a few rows on a CUDA device: all of a decoder layer, and the choice of a token.

Rows of a pass may belong to several texts. Each has a line of int64 in a table, which says where its numbers are. So no
address, position or length is an argument of a kernel, and a CUDA graph of a pass serves every text, in any cache.

A row's numbers do not depend on the other rows of its pass, bit for bit: matrix products use tiles of 16 rows whatever the
number of rows, and attention splits a text into parts by the row's own position. So a row that verification runs with others
is the row that plain decoding runs alone.

No kernel is tuned at run time. All run on a CPU with TRITON_INTERPRET=1, which is how they are tested without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKEN, POSITION, KEYS, VALUES, LENGTH, HIDDEN, SEEN, SEEN_STRIDE = range(8)
"""Columns of the table.

KEYS, VALUES: addresses of the text's cache, [layers, kv_heads, LENGTH, head_dim] each. HIDDEN: address of the row's state
between passes, [hidden]. SEEN: address of what the first layer puts out, layer l's l SEEN_STRIDE numbers further on; 0 if
nobody asks for it.
"""
COLUMNS = 8
PARTS = 32
"""Parts that a text is split into for attention: enough thread blocks for one row of a model with few heads."""
TILE = 16
"""Rows of a matrix product's tile, the fewest that a tensor core takes."""
_POSITION, _KEYS, _VALUES, _LENGTH = (tl.constexpr(column) for column in (POSITION, KEYS, VALUES, LENGTH))
_HIDDEN, _SEEN, _SEEN_STRIDE, _COLUMNS = (tl.constexpr(column) for column in (HIDDEN, SEEN, SEEN_STRIDE, COLUMNS))
_TILE = tl.constexpr(TILE)


@triton.jit
def _address(table, row, column: tl.constexpr, like):
    """Read an address from a row's line, as a pointer to numbers of the type that `like` points to."""
    place = tl.multiple_of(tl.load(table + row * _COLUMNS + column), 16)
    return tl.multiple_of(place.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _load_rows(table, out, size, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(_address(table, row, _HIDDEN, out) + at, at < size)
    tl.store(out + row * size + at, value, at < size)


def load_rows(table: Tensor, out: Tensor) -> Tensor:
    """Fill `out`, [rows, hidden], with the rows' states between passes."""
    rows, size = out.shape
    _load_rows[(rows,)](table, out, size, triton.next_power_of_2(size), num_warps=4)
    return out


@triton.jit(do_not_specialize=["layer"])
def _add_norm(
    x, delta, weight, total, out, table, layer, size, eps,
    HAS_DELTA: tl.constexpr, HAS_NORM: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, inside, 0.0)
    if HAS_DELTA:
        # The sum is rounded to the model's dtype, as an addition of its own would be.
        value = (value.to(tl.float32) + tl.load(delta + row * size + at, inside, 0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(total + row * size + at, value, inside)
        if tl.load(table + row * _COLUMNS + _SEEN) != 0:
            if layer > 0:
                seen = _address(table, row, _SEEN, x)
                stride = tl.load(table + row * _COLUMNS + _SEEN_STRIDE)
                tl.store(seen + (layer - 1).to(tl.int64) * stride + at, value, inside)
        if KEEP:
            tl.store(_address(table, row, _HIDDEN, x) + at, value, inside)
    if HAS_NORM:
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        # Rounded before the weight is applied, as transformers does.
        normed = (wide * scale).to(x.dtype.element_ty).to(tl.float32)
        tl.store(out + row * size + at, normed * tl.load(weight + at, inside, 0.0).to(tl.float32), inside)


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    norm: tuple[Tensor, float] | None,
    table: Tensor,
    layer: int = 0,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its RMS norm if there is a norm (weight and epsilon). x, delta: [rows, hidden].

    layer: the number of layers whose output the sum is, which is then also written where SEEN says; 0 if it is no layer's
    output. keep: the sum also becomes the row's state for the next pass.
    """
    rows, size = x.shape
    total = x if delta is None else torch.empty_like(x)
    out = total if norm is None else torch.empty_like(x)
    weight, eps = (x, 0.0) if norm is None else norm
    block = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        x, x if delta is None else delta, weight, total, out, table, layer, size, eps, delta is not None, norm is not None,
        keep, block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return total, out


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_store(
    qkv, table, rotary, layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(table + row * _COLUMNS + _POSITION)
    length = tl.load(table + row * _COLUMNS + _LENGTH)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    target = source
    if head >= HEADS + KV_HEADS:
        place = (layer.to(tl.int64) * KV_HEADS + head - HEADS - KV_HEADS) * length + position
        target = _address(table, row, _VALUES, qkv) + place * DIM
    elif head >= HEADS:
        place = (layer.to(tl.int64) * KV_HEADS + head - HEADS) * length + position
        target = _address(table, row, _KEYS, qkv) + place * DIM
    turned = 0
    if HALF > 0 and head < HEADS + KV_HEADS:
        turned = 2 * HALF
        at = tl.arange(0, BLOCK)
        half = at < HALF
        first = tl.load(source + at, half).to(tl.float32)
        second = tl.load(source + HALF + at, half).to(tl.float32)
        # A position's table is [2, 2, HALF]: (cos, cos), then (-sin, sin).
        cos = tl.load(rotary + position * 4 * HALF + at, half)
        sin = tl.load(rotary + position * 4 * HALF + 3 * HALF + at, half)
        tl.store(target + at, first * cos - second * sin, half)
        tl.store(target + HALF + at, second * cos + first * sin, half)
    if head >= HEADS:  # what does not turn is copied
        at = tl.arange(0, WIDE)
        rest = (at >= turned) & (at < DIM)
        tl.store(target + at, tl.load(source + at, rest), rest)


def rotate_and_store(qkv: Tensor, table: Tensor, rotary: Tensor | None, layer: int, heads: int) -> Tensor:
    """Rotate queries in place and keys into the rows' caches, and copy values there.

    qkv: [rows, heads + 2 kv_heads, dim]. rotary: float32 [positions, 4 * rotated pairs], as `LayerSkipModel.rotary`; None for
    layers that do not rotate. Returns the queries, [rows, heads, dim].
    """
    rows, total, dim = qkv.shape
    half = 0 if rotary is None else rotary.shape[1] // 4
    _rotate_and_store[(rows, total)](
        qkv, table, qkv if rotary is None else rotary, layer, heads, (total - heads) // 2, dim, half,
        triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return qkv[:, :heads]


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + at, inside, 0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, activated * up, inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [rows, size]. gate_up: [rows, 2 * size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(size, 1024))](gate_up, out, size, 1024, num_warps=4)
    return out


@triton.jit(do_not_specialize=["layer"])
def _attend_part(
    query, table, part_out, part_log, layer, stride_row, scale, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """One key-value head, one row and one part of its text. Rows of the product: the GROUP query heads."""
    kv, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = tl.load(table + row * _COLUMNS + _POSITION)
    length = tl.load(table + row * _COLUMNS + _LENGTH)
    base = (layer.to(tl.int64) * KV_HEADS + kv) * length * DIM
    keys, values = _address(table, row, _KEYS, query) + base, _address(table, row, _VALUES, query) + base
    begin = tl.maximum(own + 1 - window, 0)
    share = tl.cdiv(tl.cdiv(own + 1 - begin, COUNT), N) * N
    start = begin + part * share
    stop = tl.minimum(start + share, own + 1)
    m, d, n = tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    real, inside = m < GROUP, d < DIM
    q = tl.load(
        query + row * stride_row + ((kv * GROUP + m) * DIM)[:, None] + d[None, :], real[:, None] & inside[None, :], 0.0
    )
    best = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for first in range(start, stop, N):
        at = first + n
        there = at < stop
        k = tl.load(keys + at[None, :] * DIM + d[:, None], there[None, :] & inside[:, None], 0.0)
        scores = tl.where(there[None, :], tl.dot(q, k, input_precision="ieee") * scale, -float("inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp(scores - larger[:, None])
        shrink = tl.exp(best - larger)
        v = tl.load(values + at[:, None] * DIM + d[None, :], there[:, None] & inside[None, :], 0.0)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        best = larger
    place = ((row * KV_HEADS + kv) * COUNT + part) * GROUP + m
    if stop > start:
        tl.store(part_log + place, best + tl.log(total), real)
        tl.store(part_out + place[:, None] * D + d[None, :], out / total[:, None], real[:, None])
    else:
        tl.store(part_log + place, tl.full((M,), -float("inf"), tl.float32), real)


@triton.jit
def _attend_join(
    part_out, part_log, out, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv, member = head // GROUP, head % GROUP
    part, d = tl.arange(0, COUNT), tl.arange(0, D)
    place = ((row * (HEADS // GROUP) + kv) * COUNT + part) * GROUP + member
    logs = tl.load(part_log + place)
    weights = tl.exp(logs - tl.max(logs, 0))
    parts = tl.load(part_out + place[:, None] * D + d[None, :], (logs != -float("inf"))[:, None], 0.0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (row * HEADS + head) * DIM + d, joined, d < DIM)


def attend(query: Tensor, table: Tensor, layer: int, kv_heads: int, window: int | None = None) -> Tensor:
    """Let each row attend to its text up to itself, or to the last `window` positions of that.

    query: [rows, heads, dim], rows of any stride; keys and values of these rows are in their caches already. Returns
    [rows, heads * dim].
    """
    rows, heads, dim = query.shape
    group = heads // kv_heads
    m, d = max(triton.next_power_of_2(group), TILE), max(triton.next_power_of_2(dim), TILE)
    part_out = torch.empty(rows, kv_heads, PARTS, group, d, dtype=torch.float32, device=query.device)
    part_log = torch.empty(rows, kv_heads, PARTS, group, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, heads * dim, dtype=query.dtype, device=query.device)
    _attend_part[(kv_heads, PARTS, rows)](
        query, table, part_out, part_log, layer, query.stride(0), dim**-0.5, 1 << 40 if window is None else window,
        kv_heads, group, dim, PARTS, m, 64 if d <= 128 else 32, d, num_warps=4, num_stages=2,
    )  # fmt: skip
    _attend_join[(rows, heads)](part_out, part_log, out, heads, group, dim, PARTS, d, num_warps=1)
    return out


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, out_size, in_size, HAS_BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    m = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    real, inside = m < rows, n < out_size
    row_of = x + m[:, None].to(tl.int64) * in_size
    column_of = weight + n[None, :].to(tl.int64) * in_size
    sums = tl.zeros((_TILE, N), tl.float32)
    for first in range(0, in_size, K):
        there = first + k < in_size
        a = tl.load(row_of + (first + k)[None, :], real[:, None] & there[None, :], 0.0)
        w = tl.load(column_of + (first + k)[:, None], there[:, None] & inside[None, :], 0.0)
        sums = tl.dot(a, w, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n, inside, 0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None].to(tl.int64) * out_size + n[None, :], sums, real[:, None] & inside[None, :])


PRODUCT = (16, 256, 2, 5)
"""Outputs and inputs of a product's tile, warps and stages: the fastest of ten on an H100 (docs/gpu.md)."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: tuple[int, int, int, int] = PRODUCT) -> Tensor:
    """Return x W^T + b, [rows, out]. x: [rows, in]. weight: [out, in]."""
    rows, in_size = x.shape
    out_size = weight.shape[0]
    out = torch.empty(rows, out_size, dtype=x.dtype, device=x.device)
    n, k, warps, stages = tile
    _product[(triton.cdiv(out_size, n), triton.cdiv(rows, TILE))](
        x, weight, x if bias is None else bias, out, rows, out_size, in_size, bias is not None, n, k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _choose_part(logits, best, where, total, size, COUNT: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    exps = tl.zeros((BLOCK,), tl.float32)
    nans = tl.zeros((BLOCK,), tl.int32)
    for step in range(SHARE):
        at = (part * SHARE + step) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + row * size + at, at < size, -float("inf")).to(tl.float32)
        nans += tl.where(value == value, 0, 1)
        larger = tl.maximum(largest, value)
        base = tl.where(larger == -float("inf"), 0.0, larger)
        exps = exps * tl.exp(largest - base) + tl.exp(value - base)
        index = tl.where(value > largest, at, index)
        largest = larger
    top = tl.max(largest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    tl.store(best + row * COUNT + part, tl.where(tl.sum(nans, 0) > 0, float("nan"), top))
    tl.store(where + row * COUNT + part, tl.min(tl.where(largest == top, index, 2147483647), 0))
    tl.store(total + row * COUNT + part, tl.sum(exps * tl.exp(largest - base), 0))


@triton.jit(do_not_specialize=["rows"])
def _choose_join(best, where, total, outputs, rows, COUNT: tl.constexpr, P: tl.constexpr):
    row = tl.program_id(0)
    p = tl.arange(0, P)
    tops = tl.load(best + row * COUNT + p, p < COUNT, -float("inf"))
    spoilt = tl.sum(tl.where(tops == tops, 0, 1), 0) > 0
    top = tl.where(spoilt, float("nan"), tl.max(tops, 0))
    places = tl.load(where + row * COUNT + p, p < COUNT, 2147483647)
    sums = tl.load(total + row * COUNT + p, p < COUNT, 0.0)
    token = tl.min(tl.where(tops == top, places, 2147483647), 0)
    tl.store(outputs + row, tl.where(spoilt, 0, token).to(tl.float64))
    tl.store(outputs + rows + row, top.to(tl.float64))
    tl.store(outputs + 2 * rows + row, (1.0 / tl.sum(sums * tl.exp(tops - top), 0)).to(tl.float64))


def choose(logits: Tensor) -> Tensor:
    """Return the first of each row's largest logits, that logit (NaN if any is) and its probability: float64 [3, rows].

    logits: [rows, vocab], of any float type.
    """
    rows, size = logits.shape
    share = max(triton.cdiv(size, 1024 * 64), 1)
    parts = triton.cdiv(size, 1024 * share)
    device = logits.device
    best, total = (torch.empty(rows, parts, dtype=torch.float32, device=device) for _ in range(2))
    where = torch.empty(rows, parts, dtype=torch.int32, device=device)
    outputs = torch.empty(3, rows, dtype=torch.float64, device=device)
    _choose_part[(rows, parts)](logits, best, where, total, size, parts, 1024, share, num_warps=4)
    _choose_join[(rows,)](best, where, total, outputs, rows, parts, triton.next_power_of_2(parts), num_warps=1)
    return outputs
