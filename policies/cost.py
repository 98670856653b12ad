"""What a round costs: counted in layers (DEL eq. 1), or in seconds measured on the running device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from policies.bounds import check_exit_layer
from policies.records import Drafter, RoundRecord

DRAFTING_ON = 0.25
"""Share of the other texts that still draft when a text drafts a second token: each stops by its own confidence."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a text pays for a round, by exit layer, number of drafts and batch size. All in one unit, such as seconds.

    num_layers: of the model, L.
    layer_seconds: of one layer over 1, 2, ... rows; head_seconds: of norm + head over 1, 2, ... rows. A pass over more rows
        goes on along the line of the last two.
    draft_seconds: what a draft step costs besides its layers and head (token choice, bookkeeping); below 0 if the head that
        drafts are chosen with is faster by more than that.
    adapter_seconds: by exit layer, what an adapter after that exit adds to each look; exits that are not named have none.
    description: of model, device and threads, for the record.
    fixed: True keeps the costs as they are, whatever rounds take (`policies.auto.round_costs`): for runs that must decide
        alike.
    batch_size: texts that share the passes; each pays its part. Few rows cost little more than one, since the weights are
        read once; many cost what their arithmetic costs. So plain steps become cheap in a batch, and drafts gain less, down
        to nothing. All texts draft from one exit and verify together. They stop drafting at different tokens, so few share
        the later steps of a draft (`DRAFTING_ON`).
    block: Pacer's pre-verifier runs after every `block` drafts, for each text by itself; 0 without one. block_seconds: of one
        such pass; None for a layer, the L-th part of a plain step.
    rounded: by bits, what the model costs with its weights in 8 or 4 bits, for drafts that are made with these. Bits that are
        not named cost their share of 16.
    """

    num_layers: int
    _: KW_ONLY
    layer_seconds: tuple[float, ...] = (1.0, 1.0)
    head_seconds: tuple[float, ...] = (0.0, 0.0)
    draft_seconds: float = 0.0
    adapter_seconds: tuple[tuple[int, float], ...] = ()
    description: str = ""
    fixed: bool = False
    batch_size: int = 1
    block: int = 0
    block_seconds: float | None = None
    rounded: tuple[tuple[int, CostModel], ...] = ()

    def autoregressive(self) -> float:
        """Price a round without speculation: one row through all layers and the head."""
        return (
            self._layers(self.num_layers, self.batch_size)
            + at_rows(self.head_seconds, self.batch_size) / self.batch_size
        )

    def head_cost(self, exit_layer: int) -> float:
        """Adapter, head and decision for the first draft row, which went through `exit_layer` layers."""
        return self._look(exit_layer, self.batch_size)

    def drafting(self, exit_layer: int, num_drafts: int, bits: int | None = None) -> float:
        """Price a round's draft steps: each a row through the first E layers, and a look at it. bits: of weights."""
        if num_drafts == 0:
            return 0.0
        if bits is not None:
            return self._in_bits(bits).drafting(exit_layer, num_drafts)
        first = self._step(exit_layer, self.batch_size)
        later = self._step(exit_layer, 1 + (self.batch_size - 1) * DRAFTING_ON)
        return num_drafts * later + (first - later)

    def round(self, exit_layer: int, num_drafts: int, bits: int | None = None) -> float:
        """Price a round that drafts `num_drafts` >= 0 tokens, looks at as many rows, and verifies num_drafts + 1 rows.

        The last row goes through the first E layers alone, and then all rows together through the others and the head. After
        drafts in fewer bits all rows are verified through all layers.
        """
        cost = self.drafting(exit_layer, num_drafts, bits)
        if bits is not None:
            return cost + self.copying(num_drafts)
        rows = (num_drafts + 1) * self.batch_size
        cost += self._layers(exit_layer, self.batch_size) + self._layers(self.num_layers - exit_layer, rows)
        cost += at_rows(self.head_seconds, rows) / self.batch_size
        if self.block:  # a block cut short is not judged
            each = self.autoregressive() / self.num_layers if self.block_seconds is None else self.block_seconds
            cost += num_drafts // self.block * each
        return cost

    def _in_bits(self, bits: int) -> CostModel:
        found = next((cost for known, cost in self.rounded if known == bits), None)
        if found is None:
            share = tuple(seconds * bits / 16 for seconds in self.layer_seconds)
            found = replace(self, layer_seconds=share, adapter_seconds=())
        return found.for_batch_size(self.batch_size)

    def copying(self, copied: int) -> float:
        """Price a round that copies: `copied` + 1 rows at once through all layers. All texts of a batch copy alike."""
        rows = (copied + 1) * self.batch_size
        cost = self.num_layers * at_rows(self.layer_seconds, rows) + at_rows(self.head_seconds, rows)
        return cost / self.batch_size

    def for_batch_size(self, texts: int) -> Self:
        """Return the cost for each of `texts` texts that share their passes."""
        return self if texts == self.batch_size else replace(self, batch_size=texts)

    def _layers(self, layers: int, rows: float) -> float:
        """Return a text's share of the cost of these layers over these rows."""
        return layers * at_rows(self.layer_seconds, rows) / self.batch_size

    def _look(self, exit_layer: int, rows: float) -> float:
        """One of these rows' share of a look at all of them."""
        head = at_rows(self.head_seconds, rows)
        adapter = next((seconds for layer, seconds in self.adapter_seconds if layer == exit_layer), 0.0)
        return (max(head + self.draft_seconds, 0.1 * head) + adapter) / rows

    def _step(self, exit_layer: int, rows: float) -> float:
        """One of these rows' share of a draft step of all of them."""
        return exit_layer * at_rows(self.layer_seconds, rows) / rows + self._look(exit_layer, rows)


@dataclass(frozen=True, slots=True)
class LayerCost(CostModel):
    """The papers' cost: layers loaded. Heads, launches and the number of rows are free.

    Source: DEL (Entezari Zarch et al. 2025), section 4.1: a round of d drafts at exit layer l loads d l + L layers.
    """

    def for_batch_size(self, texts: int) -> Self:
        """Return the same cost: rows are free, so a batch divides all costs alike."""
        return self


@dataclass(frozen=True, slots=True)
class MeasuredCost(CostModel):
    """Seconds, from timings of the engine's hot calls on one device. Raises ValueError for timings that are not positive."""

    def __post_init__(self) -> None:
        for name in ("layer_seconds", "head_seconds"):
            values = getattr(self, name)
            if len(values) < 2 or not all(value > 0 for value in values):
                raise ValueError(f"{name} must hold at least two positive timings (1 row, 2 rows, ...), got {values!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return what was timed, for a JSON record; `MeasuredCost.from_dict` reads it."""
        derived = ("batch_size", "block", "block_seconds", "rounded")
        found = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in derived}
        rounded = [(bits, cost.as_dict()) for bits, cost in self.rounded if isinstance(cost, MeasuredCost)]
        return {**found, "rounded": rounded} if rounded else found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MeasuredCost:
        """Make the cost that `as_dict` described."""
        lists = {name: tuple(values[name]) for name in ("layer_seconds", "head_seconds")}
        adapters = tuple((int(layer), float(seconds)) for layer, seconds in values.get("adapter_seconds", ()))
        rounded = tuple((int(bits), cls.from_dict(cost)) for bits, cost in values.get("rounded", ()))
        return cls(**{**values, **lists, "adapter_seconds": adapters, "rounded": rounded})


def at_rows(seconds: Sequence[float], rows: float) -> float:
    """Entry for `rows` rows, between two the line between them, and beyond the last that of the last two (never falling)."""
    if rows >= len(seconds):
        return seconds[-1] + max(seconds[-1] - seconds[-2], 0.0) * (rows - len(seconds))
    below = seconds[int(rows) - 1]
    return below + (rows - int(rows)) * (seconds[int(rows)] - below)


@lru_cache(maxsize=64)
def round_costs(cost: CostModel, max_speculations: int) -> NDArray[np.float64]:
    """`cost.round` for every exit layer 1 .. L-1 and each number of drafts from 0 to max_speculations; read only."""
    layers, drafts = range(1, cost.num_layers), range(max_speculations + 1)
    found = np.array([[cost.round(layer, count) for count in drafts] for layer in layers])
    found.flags.writeable = False
    return found


@lru_cache(maxsize=256)
def _setting_costs(cost: CostModel, layers: tuple[int, ...], max_speculations: int) -> NDArray[np.float64]:
    """`round_costs` of these layers; without drafts a round is a plain step."""
    rows = [check_exit_layer(layer, cost.num_layers) - 1 for layer in layers]
    costs = round_costs(cost, max_speculations)[rows]
    costs[:, 0] = cost.autoregressive()
    return costs


def parts_of(cost: CostModel, drafter: Drafter | None, drafts: int, early: bool = False) -> tuple[float, float]:
    """Price a round's draft steps, and its verification. drafter: None for a plain step, or for copies.

    early: it stopped before a draw. One more row then went through the layers and was looked at; of an exit, verification
    need not run them again.
    """
    if drafter is None:
        return 0.0, cost.copying(drafts)
    layer, bits = drafter
    drafting = cost.drafting(layer, drafts, bits)
    verifying = cost.round(layer, drafts, bits) - drafting
    if early:
        first = cost.drafting(layer, 1, bits)
        drafting += first if bits is not None else cost.drafting(layer, drafts + 1) - drafting
        verifying -= 0.0 if bits is not None else first - cost.head_cost(layer)
    return drafting, verifying


def cost_of_sweep(cost: CostModel, layers: int, rows: float) -> float:
    """Price a sweep of a wave: so many rows through the layers of a loop, and the head on each of them."""
    return layers * at_rows(cost.layer_seconds, rows) + at_rows(cost.head_seconds, rows)


def cost_of_round(record: RoundRecord, cost: CostModel) -> float:
    """Price a finished round: all rows that it ran, including one that was dropped.

    Of a wave: its sweeps, of fewer rows while it fills its diagonal.
    """
    if record.sweeps:
        rows = max(cost.num_layers * record.sweeps / record.loaded_layers - (record.sweeps - 1) / 2, 1)
        return record.sweeps * cost_of_sweep(cost, record.loaded_layers // record.sweeps, rows)
    return sum(parts_of(cost, record.drafter, record.num_drafted, record.stop_cause == "before_draw"))


def tokens_per_cost(acceptance: float, exit_layer: int, num_drafts: int, cost: CostModel) -> float:
    """Divide the expected tokens of a round by its cost; with `LayerCost` DEL's TPL(l, d).

    acceptance: chance that a draft is accepted if those before it were, alike for each, in [0, 1]. 1 + a + ... + a^d is the
    expectation, written as a sum so that a = 1 is no special case. num_drafts = 0 is an autoregressive round.
    Raises ValueError when acceptance lies outside [0, 1] or the model cannot exit at exit_layer.
    Source: DEL section 4.1, eq. 1, TPL(l, d) = (1 - a^(d+1)) / ((1 - a) (d l + L)).
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be in [0, 1], got {acceptance!r}")
    check_exit_layer(exit_layer, cost.num_layers)
    if num_drafts == 0:
        return 1 / cost.autoregressive()
    return sum(acceptance**i for i in range(num_drafts + 1)) / cost.round(exit_layer, num_drafts)


def best_setting(
    acceptance: Mapping[int, float], max_speculations: int, cost: CostModel, *, first: int = 0
) -> tuple[int, int, float]:
    """Find the (exit layer, length, tokens per cost) with most tokens per cost; lengths first .. max_speculations.

    acceptance: of every candidate exit layer. Of equals the lowest layer wins, then the shortest length.
    """
    layers = tuple(sorted(acceptance))
    if not layers or first > max_speculations:
        raise ValueError("there must be at least one candidate exit layer and one length")
    costs = _setting_costs(cost, layers, max_speculations)
    powers = np.ones(costs.shape)
    powers[:, 1:] = np.array([acceptance[layer] for layer in layers])[:, None]
    rates = (powers.cumprod(axis=1).cumsum(axis=1) / costs)[:, first:]
    index, length = divmod(int(rates.argmax()), rates.shape[1])
    return layers[index], first + length, float(rates[index, length])
