"""Costs of a model that has not run: those that were kept, or an estimate from the bytes and products of its passes.

An estimate's seconds may be far off. Its ratios are what matters: of an exit to a whole step, of fewer bits, of many rows to
one. Decoding corrects them by what its rounds take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from layerskip_models import LayerSkipModel
from layerskip_models.decoder_layer import Linear
from layerskip_models.draft_weights import last_cache
from layerskip_models.grouped_weight import GroupedLinear
from layerskip_models.kernels.native_linear import NativeInt8Linear, NativeLinear
from layerskip_models.kernels.threads import num_threads
from layerskip_models.linear import EIGHT_BIT_LAYERS, PlainLinear, row_bits
from policies import MeasuredCost
from selfspec.engine.kept_costs import kept_cost
from selfspec.engine.runners.runner import RunnerName, resolve_runner

CONTEXT = 512  # positions that a row attends to: in a small model further rows of a pass pay most for attention
_ROWS = range(1, 17)
_BEND = 3  # a pass takes (waiting ** 3 + computing ** 3) ** (1 / 3): the two overlap, but not all of the time
_MEMORY_THREADS = 4  # more of them read no faster from memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """Speeds of a thread, fitted to calibrations of five models on a Zen 4: 7 million to 1.5 billion weights, 4 to 16 bits.

    products: a second, by bits of the row's numbers, 32 for floats; attention: the same of attention. memory, cache: bytes
    read a second, the latter where the model fits the last cache. layer, head: seconds of a pass besides. unpacked, gathered:
    seconds a weight and pass, to make floats of fewer bits, and for operators to multiply more than one row.
    """

    products: Mapping[int, float]
    attention: float = 23e9
    memory: float = 24e9
    cache: float = 27e9
    layer: float = 0.0
    head: float = 40e-6
    unpacked: float = 0.0
    gathered: float = 0.0


_WIDE = _Machine(products={32: 50e9, 24: 85e9, 16: 150e9, 8: 160e9})  # AVX-512
_NARROW = _Machine(products={32: 54e9, 16: 56e9, 8: 74e9}, cache=22e9)  # AVX2, and others without a fit of their own
_OPERATORS = _Machine(products={32: 50e9, 8: 50e9}, layer=3e-4, head=2e-4, unpacked=4e-10, gathered=2.5e-10)
_GPU = _Machine(products={32: 2e14}, attention=1e13, memory=1.5e12, cache=1.5e12, layer=3e-4, head=1e-4)  # not fitted
_GRAPHS = replace(_GPU, layer=25e-6, head=25e-6)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """numbers: of a matrix; bits: of each, scales included; rows: bits of the rows that it meets."""

    numbers: int
    bits: float
    rows: int

    @classmethod
    def of(cls, linear: Linear) -> StoredMatrix:
        assert isinstance(linear, (NativeLinear, PlainLinear, GroupedLinear))
        weight = linear.weight if isinstance(linear, PlainLinear) else linear
        outputs, inputs = (weight.numbers if isinstance(weight, GroupedLinear) else weight).shape
        limbs = isinstance(linear, NativeInt8Linear) and linear.matrix.interleaved
        numbers = outputs * inputs
        return cls(numbers, 8 * linear.num_bytes / numbers, 24 if limbs else row_bits(linear))

    def rounded(self, bits: int, rows: int) -> StoredMatrix:
        """Return the matrix as drafts in so many bits meet it. rows: bits of the rows that 8-bit weights meet."""
        if self.bits < bits + 2:  # it has no more: scales take up to 1.1 bits
            return self
        return StoredMatrix(self.numbers, 8.1, rows) if bits == 8 else StoredMatrix(self.numbers, 4.5, 8)


def expected_cost(model: LayerSkipModel, runner: RunnerName | None = None, bits: Collection[int] = ()) -> MeasuredCost:
    """Return the model's costs without running it: kept ones if there are any, else an estimate.

    runner: of the passes; None for the one that a generator takes by default. bits: of drafts that may be made; those that
    the model has are priced anyway.
    """
    runner = resolve_runner("auto", model) if runner is None else runner
    machine = _WIDE if model.kernels in ("amx", "vnni", "avx512") else _NARROW if model.kernels else _OPERATORS
    if model.device.type != "cpu":
        machine = _GRAPHS if runner == "graphs" else _GPU
    groups = [*(layer.linears for layer in model.layers), (model.head, model.drafting_head)]
    weights = [[StoredMatrix.of(linear) for linear in group] for group in groups]
    own, kept = _cost(model, machine, weights), kept_cost(model, runner)
    scale = 1.0 if kept is None else kept.autoregressive() / own.autoregressive()  # a kept cost's seconds are right
    own, rounded = kept or own, dict(kept.rounded if kept is not None else ())
    for each in sorted({*model.drafters, *bits} - {*rounded}):
        loop = ([8] * EIGHT_BIT_LAYERS + [each] * model.loop_layers)[: model.loop_layers]
        in_bits = loop * model.num_loops + [8]
        limbs = 24 if 24 in machine.products else 32
        made = [[one.rounded(few, limbs) for one in group] for few, group in zip(in_bits, weights)]
        made[-1][0] = made[-1][1]  # drafts use no other head
        rounded[each] = _cost(model, machine, made, scale)
    return replace(own, rounded=tuple(sorted(rounded.items())))


def _cost(
    model: LayerSkipModel, machine: _Machine, weights: Sequence[Sequence[StoredMatrix]], scale: float = 1.0
) -> MeasuredCost:
    """Estimate a cost. weights: of each layer, and then of the head and the draft head. scale: of all seconds."""
    *layers, (head, draft_head) = weights
    matrices = [one for layer in layers for one in layer]
    context, threads = min(CONTEXT, model.max_positions), num_threads() if model.device.type == "cpu" else 1
    past = 2 * context * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize
    held = sum(one.numbers * one.bits / 8 for one in matrices) / model.num_loops  # loops share their matrices
    size = model.num_layers * past + held + head.numbers * head.bits / 8
    in_cache = size < last_cache()
    bandwidth = threads * machine.cache if in_cache else min(threads, _MEMORY_THREADS) * machine.memory

    def seconds(one: StoredMatrix, rows: int) -> float:
        unpacked = machine.unpacked / threads if one.bits < 16 else 0.0
        waits = one.numbers * (one.bits / 8 / bandwidth + unpacked + (rows > 1) * machine.gathered / threads)
        computes = rows * one.numbers / threads / machine.products.get(one.rows, machine.products[32])
        return float(scale * (waits**_BEND + computes**_BEND) ** (1 / _BEND))

    attention = scale * 2 * context * model.num_heads * model.head_dim / machine.attention / threads  # of a row
    besides = scale * (machine.layer + (0.0 if in_cache else past / bandwidth))
    products = [sum(seconds(one, rows) for one in matrices) / model.num_layers for rows in _ROWS]
    return MeasuredCost(
        num_layers=model.num_layers,
        layer_seconds=tuple(each + besides + rows * attention for rows, each in zip(_ROWS, products)),
        head_seconds=tuple(seconds(head, rows) + scale * machine.head for rows in _ROWS),
        draft_seconds=seconds(draft_head, 1) - seconds(head, 1),
        adapter_seconds=tuple((at, scale * one.num_bytes / bandwidth) for at, one in sorted(model.adapters.items())),
        description="estimated",
    )
