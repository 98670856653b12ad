"""Costs of a model that has not run: those that were kept, or an estimate from the bytes and products of its passes.

An estimate's seconds may be far off. Its ratios are what matters: of an exit to a whole step, of fewer bits, of many rows to
one. Decoding corrects them by what its rounds take. The speeds are those of one thread of a Zen 4, fitted to calibrations of
five models of 7 million to 1.5 billion weights in 4 to 16 bits; that of operators and GPUs are rough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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

_ROWS = 16
_CONTEXT = 512  # positions that a row attends to, as in a calibration
_BEND = 3  # a pass takes (waiting ** 3 + computing ** 3) ** (1 / 3): the two overlap, but not all of the time
_MEMORY_THREADS = 4  # more of them read no faster from memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """What runs a model. memory, cache: bytes that a thread reads a second, where the model fits the last cache or doesn't.

    products: that it computes a second, by bits of the row's numbers; 32 are floats. attention: the same of attention.
    layer, head: seconds of a pass besides. unpacked: seconds to make a float of a number in groups, once a pass.
    gathered: seconds for each number that several rows cost besides, together.
    """

    memory: float = 24e9
    cache: float = 27e9
    products: Mapping[int, float]
    attention: float = 23e9
    layer: float = 0.0
    head: float = 40e-6
    unpacked: float = 0.0
    gathered: float = 0.0


_WIDE = _Machine(products={32: 50e9, 24: 85e9, 16: 150e9, 8: 160e9})
_NARROW = _Machine(cache=22e9, products={32: 54e9, 16: 56e9, 8: 74e9})
_OPERATORS = _Machine(products={32: 50e9, 8: 50e9}, layer=0.3e-3, head=0.2e-3, unpacked=0.4e-9, gathered=0.25e-9)
_GPU = _Machine(memory=1.5e12, cache=1.5e12, products={32: 2e14}, attention=1e13, layer=0.3e-3, head=0.1e-3)
_GRAPHS = replace(_GPU, layer=25e-6, head=25e-6)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix as passes see it. numbers: how many; bits: of each, scales included; rows: bits of the rows that it meets."""

    numbers: int
    bits: float
    rows: int

    @classmethod
    def of(cls, linear: Linear) -> StoredMatrix:
        assert isinstance(linear, (NativeLinear, PlainLinear, GroupedLinear))
        if isinstance(linear, NativeLinear):
            outputs, inputs = linear.shape
        else:
            outputs, inputs = (linear.weight if isinstance(linear, PlainLinear) else linear.numbers).shape
        limbs = isinstance(linear, NativeInt8Linear) and linear.matrix.interleaved
        return cls(outputs * inputs, 8 * linear.num_bytes / (outputs * inputs), 24 if limbs else row_bits(linear))

    def rounded(self, bits: int, rows: int) -> StoredMatrix:
        """Return the matrix as drafts in so many bits meet it. rows: bits of the rows that 8-bit weights meet."""
        if self.bits < bits + 2:  # it has no more: scales take up to 1.1 bits
            return self
        return StoredMatrix(self.numbers, 8.1, rows) if bits == 8 else StoredMatrix(self.numbers, 4.5, 8)


def expected_cost(model: LayerSkipModel, runner: RunnerName | None = None, bits: Collection[int] = ()) -> MeasuredCost:
    """Return the model's costs without running it: kept ones if there are any, else an estimate.

    runner: as for `measured_cost`. bits: of drafts that may be made; those that the model has are priced anyway.
    """
    runner = resolve_runner("auto", model) if runner is None else runner
    machine = _machine(model, runner)
    groups = [*(layer.linears for layer in model.layers), (model.head, model.draft_head)]
    weights = [[StoredMatrix.of(linear) for linear in group] for group in groups]
    own, kept = _cost(model, machine, weights), kept_cost(model, runner)
    scale = 1.0 if kept is None else kept.autoregressive() / own.autoregressive()  # a kept cost's seconds are right
    own, rounded = kept or own, dict(kept.rounded if kept is not None else ())
    limbs = 24 if 24 in machine.products else 32
    for each in sorted({*model.drafters, *bits} - {*rounded}):
        in_eight = [index < EIGHT_BIT_LAYERS or index == model.num_layers for index in range(len(weights))]
        made = [[one.rounded(8 if eight else each, limbs) for one in group] for eight, group in zip(in_eight, weights)]
        made[-1][0] = made[-1][1]  # drafts use no other head
        rounded[each] = _cost(model, machine, made, scale)
    return replace(own, rounded=tuple(sorted(rounded.items())))


def _machine(model: LayerSkipModel, runner: RunnerName) -> _Machine:
    """Choose what runs a model, and give it its threads."""
    if model.device.type != "cpu":
        return _GRAPHS if runner == "graphs" else _GPU
    chosen = _OPERATORS if model.kernels is None else _WIDE if model.kernels in ("amx", "vnni", "avx512") else _NARROW
    threads = num_threads()
    products = {rows: threads * speed for rows, speed in chosen.products.items()}
    memory, cache = min(threads, _MEMORY_THREADS) * chosen.memory, threads * chosen.cache
    return replace(chosen, memory=memory, cache=cache, products=products, attention=threads * chosen.attention)


def _cost(
    model: LayerSkipModel, machine: _Machine, weights: list[list[StoredMatrix]], scale: float = 1.0
) -> MeasuredCost:
    """Estimate a cost. weights: of each layer, and then of the head and the draft head. scale: of all seconds."""
    *layers, (head, draft_head) = weights
    context = min(_CONTEXT, model.max_positions)
    past = 2 * context * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize
    matrices = [one for layer in layers for one in layer]
    size = model.num_layers * past + sum(one.numbers * one.bits / 8 for one in [*matrices, head])
    bandwidth = machine.cache if (in_cache := size < last_cache()) else machine.memory

    def seconds(one: StoredMatrix, rows: int) -> float:
        unpacked = machine.unpacked if one.bits < 16 else 0.0
        waits = one.numbers * (one.bits / 8 / bandwidth + unpacked + (rows > 1) * machine.gathered)
        computes = rows * one.numbers / machine.products.get(one.rows, machine.products[32])
        return float(scale * (waits**_BEND + computes**_BEND) ** (1 / _BEND))

    every = range(1, _ROWS + 1)
    attention = scale * 2 * context * model.num_heads * model.head_dim / machine.attention  # of a row
    besides = scale * (machine.layer + (0.0 if in_cache else past / bandwidth))
    products = [sum(seconds(one, rows) for one in matrices) / model.num_layers for rows in every]
    return MeasuredCost(
        num_layers=model.num_layers,
        layer_seconds=tuple(each + besides + rows * attention for rows, each in zip(every, products)),
        head_seconds=tuple(seconds(head, rows) + scale * machine.head for rows in every),
        draft_seconds=seconds(draft_head, 1) - seconds(head, 1),
        adapter_seconds=tuple(
            (layer, scale * one.num_bytes / bandwidth) for layer, one in sorted(model.adapters.items())
        ),
        description="estimated",
    )
