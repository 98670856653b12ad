"""Check that the kernels compute correctly on this machine, since a compiler or a processor may have bugs.

A few small layers with odd sizes and matrices of every kind run row by row and with all rows together, on one thread and on
several, after a prefix long enough to be divided among threads. So do matrices that fill a matrix unit's tiles, with 1 to 33
rows. Results and KV caches must be bit-identical, and must match PyTorch's float64 within rounding. Takes some ten
milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.choices import choices_of
from layerskip_models.decoder_layer import DecoderLayer, Linear
from layerskip_models.grouped_weight import BLOCK, GroupedWeight, pack_nibbles, pack_sixes, rounded_rows
from layerskip_models.kernels import library
from layerskip_models.kernels.native_layers import KV_DTYPES, NativeLayers
from layerskip_models.kernels.native_linear import NativeGroupedLinear, NativeInt8Linear, NativeLinear
from layerskip_models.kernels.native_sampling import Warp, accept_drafts, distribute, draw, look
from layerskip_models.kernels.threads import SingleThreadedOperators, num_threads, on_threads
from layerskip_models.kernels.weights import takes_interleaved
from layerskip_models.kv_cache import KVCache
from layerskip_models.norm import RMSNorm

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, ROWS, EPS = 43, 6, 2, 18, 37, 9, 1e-5
LAYERS, WINDOW = 3, 6
GROUPED = 192  # inputs of the 4-bit matrix; must be a multiple of its group
MANY = 4  # times ROWS: enough rows for the kernels to take another code path
EARLIER = library.SECTION - 4  # positions before the rows, chosen so that the rows lie in two sections
TILED = (64, 128)  # outputs and inputs of a matrix that fills tiles; outputs of one in groups that is interleaved
TILED_ROWS = 33  # two tiles' rows and one more
VOCAB = 300  # tokens to draw from
_Norms = tuple[RMSNorm | None, RMSNorm | None]
_NO_NORMS: _Norms = (None, None)
_BOUND = 1e-4  # largest error of numbers around 1
_CUT_BOUND = 1e-3  # the same with weights in groups, for which rows are cut to 16 bits
_ROUNDED_BOUND = 3e-2  # the same where keys and values are rounded to bfloat16


@dataclass(frozen=True)
class _SmallModel:
    """What a KV cache needs to know about a model with these layers."""

    num_layers: int = LAYERS
    num_kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    kv_dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def prepare(self, max_length: int) -> None:
        pass  # the rotary table is random


def _cache(keys: Tensor, values: Tensor) -> KVCache:
    """Make a cache that holds these, [layers, kv_heads, EARLIER, head_dim] each, and has room for the rows."""
    cache = KVCache(_SmallModel(kv_dtype=keys.dtype), EARLIER + ROWS)
    cache.keys.zero_()
    cache.values.zero_()
    cache.keys[..., :EARLIER], cache.values[:, :, :EARLIER] = keys.mT, values
    cache.declare(EARLIER)
    return cache


class _Drawn:
    """Random float32 tensors on the CPU, the same every time."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(1 + 0.1 * self(size), EPS)

    def layers(self) -> list[DecoderLayer]:
        """Three layers with the same matrices.

        The first has norms before attention and the MLP; the second after them and over all heads together, with a window;
        the third before them, over each head and on entry, without rotation.
        """
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        matrices = (
            NativeLinear((self(width, HIDDEN) * HIDDEN**-0.5).bfloat16(), self(width)),
            NativeLinear((self(HIDDEN, HEADS * HEAD_DIM) * 0.1).half()),
            NativeLinear(self(2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5, self(2 * INTERMEDIATE)),
            NativeInt8Linear(self(HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5),
        )
        before, after, heads = self._norms(HIDDEN), self._norms(HIDDEN), self._norms(HEAD_DIM)
        queries, keys = self.norm(HEADS * HEAD_DIM), self.norm(KV_HEADS * HEAD_DIM)
        qkv, output, gate_up, down = matrices

        def layer(inputs: _Norms, outputs: _Norms, heads: _Norms, **kind: Any) -> DecoderLayer:
            return DecoderLayer(
                inputs[0], qkv, output, inputs[1], gate_up, down, True, *outputs, *heads, **kind
            )  # fmt: skip

        return [
            layer(before, _NO_NORMS, _NO_NORMS),
            layer(_NO_NORMS, after, (queries, keys), sliding_window=WINDOW),
            layer(before, _NO_NORMS, heads, rotated=False, entry_norm=self.norm(HIDDEN)),
        ]

    def four_bits(self, outputs: int, rows: int) -> NativeGroupedLinear:
        """Make a 4-bit linear with offsets. rows: bits of its inputs."""
        numbers = (self(outputs, GROUPED) * 3 + 8).clamp(0, 15).to(torch.uint8)
        scales, offsets = self(2, outputs, GROUPED // 64) / 50
        weight = GroupedWeight(pack_nibbles(numbers), scales.half(), offsets)
        return NativeGroupedLinear(weight, self(outputs), rows=rows)

    def six_bits(self, outputs: int, rows: int) -> NativeGroupedLinear:
        """Make a linear of 6 bits, whose scales are integers that a block's scale multiplies."""
        numbers = (self(outputs, BLOCK) * 10 + 32).clamp(0, 63)
        scales, blocks = (self(outputs, BLOCK // 16) * 20).to(torch.int8), self(outputs, 1, 1) / 5000
        weight = GroupedWeight(pack_sixes(numbers), scales, blocks=blocks.half(), bits=6, zero=32)
        return NativeGroupedLinear(weight, self(outputs), rows=rows)

    def tiled(self) -> list[NativeLinear]:
        """Linears that a matrix unit multiplies, not in groups; in bfloat16 although larger matrices only go there."""
        weight, bias = self(*TILED) * TILED[1] ** -0.5, self(TILED[0])
        halves = NativeLinear(weight.bfloat16(), bias)
        if takes_interleaved(library.KINDS[torch.bfloat16], 1 << 20, TILED[1]) and not halves.matrix.interleaved:
            halves.matrix.interleaved = 1
        return [NativeInt8Linear(weight, bias), halves]

    def _norms(self, size: int) -> tuple[RMSNorm, RMSNorm]:
        return self.norm(size), self.norm(size)


def fault() -> str | None:
    """Say what this process's kernels compute wrongly; None if nothing."""
    with SingleThreadedOperators(), torch.inference_mode(), torch.autocast("cpu", enabled=False):
        drawn = _Drawn()
        x = drawn(ROWS, HIDDEN)
        layers = drawn.layers()
        found = _fault_of_linear(_native(layers[0].qkv), x, norm=layers[0].input_norm)
        angles, size = drawn(EARLIER + ROWS, HEAD_DIM // 2), (LAYERS, KV_HEADS, EARLIER, HEAD_DIM)
        for kv_dtype in KV_DTYPES:
            found = found or _fault_of_layers(layers, x, angles, *(drawn(*size).to(kv_dtype) for _ in range(2)))
        for outputs, bits in product((INTERMEDIATE, TILED[0]), (8, 16)):  # the last 16 are padded, or not
            for grouped in (drawn.four_bits(outputs, bits), drawn.six_bits(outputs, bits)):
                width = grouped.shape[1]
                rows, norm = drawn(TILED_ROWS if outputs == TILED[0] else ROWS, width), drawn.norm(width)
                found = found or _fault_of_linear(grouped, rows, _CUT_BOUND, norm if bits == 16 else None)
        x = drawn(TILED_ROWS, TILED[1])
        for tiled in drawn.tiled():
            found = found or _fault_of_linear(tiled, x)
        return found or _fault_of_sampling(drawn(2, VOCAB), drawn(2, VOCAB))


def _teams() -> list[int]:
    return sorted({1, 2, num_threads()})


def _fault_of_linear(linear: NativeLinear, x: Tensor, bound: float = _BOUND, norm: RMSNorm | None = None) -> str | None:
    """Say whether a row's product depends on its company, or is far from that in float64; with `norm`, also of norm(x).

    Every number of rows is tried on one thread, since each may reach a matrix unit differently, and some on several.
    """
    calls: list[tuple[str, Callable[[Tensor], Tensor], Tensor]] = [("linear", linear, x.double())]
    if norm is not None:
        calls.append(("normalised_linear", partial(linear.of_normalised, norm), _normed(x.double(), norm)))
    if not torch.equal(linear.rows(torch.arange(linear.shape[0], device="cpu")), linear.weight):
        return "rows reads other numbers"
    many = x.repeat(MANY, 1)
    for name, call, inputs in calls:
        with on_threads(1):
            alone = torch.cat([call(row) for row in x.split(1)])
        for threads in _teams():
            counts = range(2, len(x) + 1, 1 if threads == 1 else 5)
            with on_threads(threads):
                same = all(torch.equal(call(x[:rows]), alone[:rows]) for rows in counts)
                if not same or not torch.equal(call(many), alone.repeat(MANY, 1)):
                    return f"{name} computes a row otherwise in company, on {threads} threads"
        if isinstance(linear, NativeGroupedLinear) and linear.row_bits == 8:
            inputs = rounded_rows(x).double()
        if not _near(alone, inputs @ linear.weight.double().T + linear.tensors[-1].double(), bound):
            return f"{name} computes something else"
    return None


def _fault_of_sampling(logits: Tensor, other: Tensor) -> str | None:
    """logits, other: [2, vocab]."""
    top_k, top_p, temperature = VOCAB // 2, 0.8, 0.5
    p, narrow, q = torch.empty_like(logits), torch.empty_like(logits), torch.empty_like(logits)
    distribute(logits, Warp(temperature, top_k), p)
    distribute(logits, Warp(temperature, top_k, top_p), narrow)
    distribute(other, Warp(), q)
    found, expected_looks = look(logits, "all"), choices_of(logits.double(), "all")
    if not torch.equal(found.tokens, expected_looks.tokens) or not _near(found.numbers, expected_looks.numbers):
        return "look computes something else"
    scores = logits.double() / temperature
    scores[scores < scores.topk(top_k).values[:, -1:]] = -torch.inf
    exact = scores.softmax(-1)
    order = exact.sort()
    removed = torch.empty_like(exact, dtype=torch.bool).scatter_(1, order.indices, order.values.cumsum(-1) <= 1 - top_p)
    cut = exact.masked_fill(removed, 0)
    pairs = (p, exact), (narrow, cut / cut.sum(-1, keepdim=True)), (q, other.double().softmax(-1))
    if not all(_near(found * VOCAB, expected * VOCAB) for found, expected in pairs):
        return "distribute computes something else"
    weights = (p[0] - q[0]).clamp(min=0)
    unlikely = int((q[0] - p[0]).argmax())
    judged = accept_drafts(logits, Warp(temperature, top_k), [unlikely], q[:1], [0.999999], 0.5)
    if (judged.num_accepted, judged.token) != (0, draw(weights, 0.5)):
        return "accept computes something else"
    sums = weights.double().cumsum(0)
    for share in (0.0, 0.1, 0.5, 0.9):
        token = draw(weights, share)
        if token is None or not float(sums[token] - weights[token]) <= share * float(sums[-1]) + _BOUND:
            return "draw takes another token"
        if weights[token] == 0 or float(sums[token]) < share * float(sums[-1]) - _BOUND:
            return "draw takes another token"
    return None


def _fault_of_layers(
    described: list[DecoderLayer], x: Tensor, angles: Tensor, keys: Tensor, values: Tensor
) -> str | None:
    """Compare rows alone and in company, after these keys and values, with the layers in float64."""
    layers = NativeLayers(described, hidden_size=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, eps=EPS)
    rotary = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    one = _cache(keys, values)
    with on_threads(1):
        rows = [layers.run(row, 0, LAYERS, ((one, 1),), rotary, None) for row in x.split(1)]
    alone = torch.cat(rows)
    for threads in _teams():
        many, other = _cache(keys, values), _cache(keys, values)
        with on_threads(threads):
            first = layers.run(x[:2], 0, LAYERS, ((many, 2),), rotary, None)
            mixed = layers.run(torch.cat([x[2:], x[:2]]), 0, LAYERS, ((many, ROWS - 2), (other, 2)), rotary, None)
            together = torch.cat([first, mixed[:-2]])
        same = torch.equal(together, alone) and torch.equal(mixed[-2:], alone[:2])
        if not same or not torch.equal(many.keys, one.keys) or not torch.equal(many.values, one.values):
            return f"step computes a row otherwise in company, on {threads} threads"
    expected = x.double()
    for index, layer in enumerate(described):
        expected = _reference(layer, expected, rotary[EARLIER:], keys[index], values[index])
    bound = _BOUND if keys.dtype == torch.float32 else _ROUNDED_BOUND
    return None if _near(alone, expected, bound) else "step computes something else"


def _reference(layer: DecoderLayer, x: Tensor, rotary: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute the layer in float64 with PyTorch's operators.

    x: [rows, hidden]. rotary: for x. keys, values: of earlier rows.
    """
    qkv, output, gate_up, down = map(_native, (layer.qkv, layer.output, layer.gate_up, layer.down))
    x = _normed(x, layer.entry_norm)
    rows = _normed(x, layer.input_norm) @ qkv.weight.double().T + qkv.tensors[-1].double()
    query, key, value = rows.view(ROWS, -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    query, key = (
        _normed(part.reshape(ROWS, -1, HEAD_DIM if norm is None else norm.size), norm).view(part.shape)
        for part, norm in ((query, layer.query_norm), (key, layer.key_norm))
    )
    if layer.rotated:
        query, key = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * rotary).flatten(-2)
            for part in (query, key)
        )
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for part in (key, value))
    group = HEADS // KV_HEADS
    key = torch.cat([keys.double().repeat_interleave(group, 0), key], 1)
    value = torch.cat([values.double().repeat_interleave(group, 0), value], 1)
    scores = query.transpose(0, 1) @ key.mT * HEAD_DIM**-0.5
    unseen = torch.ones(ROWS, EARLIER + ROWS, dtype=torch.bool, device="cpu").triu_(1 + EARLIER)
    if layer.sliding_window is not None:
        unseen |= ~torch.ones_like(unseen).triu_(1 + EARLIER - layer.sliding_window)
    attended = scores.masked_fill_(unseen, -torch.inf).softmax(-1) @ value  # [heads, rows, head_dim]
    x = x + _normed(attended.transpose(0, 1).flatten(1) @ output.weight.double().T, layer.output_norm)
    gates = _normed(x, layer.post_attention_norm) @ gate_up.weight.double().T + gate_up.tensors[-1].double()
    gate, up = gates.chunk(2, 1)
    return x + _normed((F.silu(gate) * up) @ down.weight.double().T, layer.down_norm)


def _native(linear: Linear) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear


def _normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    if norm is None:
        return x
    factors = norm.factors
    assert factors is not None
    return x / (x.square().sum(-1, keepdim=True) + norm.size * EPS).sqrt() * factors.double()


def _near(found: Tensor, expected: Tensor, bound: float = _BOUND) -> bool:
    return bool(((found.double() - expected).abs() <= bound * (1 + expected.abs())).all())


def native_variant(device: torch.device, dtype: torch.dtype) -> str | None:
    """Name the kernel variant that a model on this device and in this dtype would use, or None. For records."""
    chosen = library.kernels()
    return chosen.variant if chosen is not None and native_works(device, dtype) else None


@cache
def _passes(variant: str) -> bool:
    """Return whether there is no `fault`. Checked once per variant."""
    wrong = fault()
    if wrong is not None:
        library.refuse(f"the {variant} kernels failed their check on this machine: {wrong}")
    return wrong is None


def native_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether linears and layers on this device and in this dtype may run on our own kernels.

    Kernels that fail the check are not used. One warning says so, or a KernelsUnavailableError if the environment demands
    them (SELFSPEC_NATIVE, see library.py).
    """
    if device.type != "cpu" or dtype != torch.float32:
        return False
    chosen = library.kernels()
    return chosen is not None and _passes(chosen.variant)
