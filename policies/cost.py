"""What a round costs: counted in layers (DEL eq. 1), or in seconds measured on the running device."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from policies.base import check_exit_layer
from policies.records import RoundRecord


class CostModel(Protocol):
    """Cost of one round, in any unit that is the same for all its methods."""

    @property
    def num_layers(self) -> int:
        """Layers of the model, L."""
        ...

    def autoregressive(self) -> float:
        """A round without speculation: one row through all layers."""
        ...

    def look(self, exit_layer: int) -> float:
        """Norm, head and decision for one draft row that went through `exit_layer` layers."""
        ...

    def drafting(self, exit_layer: int, num_drafts: int) -> float:
        """So many draft steps: each a row through the first E layers, and a look at it. Part of `round`."""
        ...

    def round(self, exit_layer: int, num_drafts: int) -> float:
        """A round that drafts `num_drafts` >= 0 tokens, looking at as many rows, and verifies num_drafts + 1 rows."""
        ...

    def copying(self, exit_layer: int, tried: int, kept: int) -> float:
        """A round that copies: `tried` + 1 rows at once through `exit_layer` layers, and a look at each of them, then
        `kept` + 1 through the others. exit_layer = 0: no look, and tried = kept."""
        ...

    def for_batch_size(self, texts: int) -> CostModel:
        """The cost for each of `texts` texts that share their passes."""
        ...


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The paper's cost: layers loaded. Heads, launches and the number of rows are free.

    Source: DEL (Entezari Zarch et al. 2025), section 4.1: a round of d drafts at exit layer l loads d l + L layers.
    """

    num_layers: int

    def autoregressive(self) -> float:
        return float(self.num_layers)

    def look(self, exit_layer: int) -> float:
        """0: the head is not counted."""
        return 0.0

    def drafting(self, exit_layer: int, num_drafts: int) -> float:
        return float(num_drafts * exit_layer)

    def round(self, exit_layer: int, num_drafts: int) -> float:
        """num_drafts * exit_layer + L."""
        return float(num_drafts * exit_layer + self.num_layers)

    def copying(self, exit_layer: int, tried: int, kept: int) -> float:
        """L: a plain step's layers."""
        return float(self.num_layers)

    def for_batch_size(self, texts: int) -> LayerCost:
        """The same cost: rows are free, so a batch divides all costs alike."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """Seconds, from timings of the engine's two hot calls on one device.

    layer_seconds: of one layer over 1, 2, ... rows; head_seconds: of norm + head over 1, 2, ... rows; a round of more rows
        than were timed goes on along the line of the last two.
    draft_seconds: what a draft step costs besides its layers and head (token choice, bookkeeping); below 0 if the head that
        drafts are chosen with is faster by more than that.
    adapter_seconds: by exit layer, what an adapter after that exit adds to each look; exits that are not named have none.
    round_seconds: what a speculative round costs in addition to its draft steps and verification, compared with a plain one.
    description: of model, device and threads, for the record.
    fixed: True keeps the costs as they are, whatever rounds take (`policies.auto.drift`): for runs that must decide alike.
    Raises ValueError for timings that are missing or not positive.
    """

    num_layers: int
    layer_seconds: tuple[float, ...]
    head_seconds: tuple[float, ...]
    draft_seconds: float = 0.0
    adapter_seconds: tuple[tuple[int, float], ...] = ()
    round_seconds: float = 0.0
    description: str = ""
    fixed: bool = False

    def __post_init__(self) -> None:
        for name in ("layer_seconds", "head_seconds"):
            values = getattr(self, name)
            if len(values) < 2 or not all(value > 0 for value in values):
                raise ValueError(f"{name} must hold at least two positive timings (1 row, 2 rows, ...), got {values!r}")

    def autoregressive(self) -> float:
        """One row through all layers and the head."""
        return self.num_layers * self.layer_seconds[0] + self.head_seconds[0]

    def look(self, exit_layer: int) -> float:
        """One row's adapter and head, and what a draft step adds to them."""
        return self.head_seconds[0] + self.draft_seconds + self.adapter(exit_layer)

    def adapter(self, exit_layer: int) -> float:
        """Seconds of this exit's adapter, over one row or a few; 0 without one."""
        return next((seconds for layer, seconds in self.adapter_seconds if layer == exit_layer), 0.0)

    def drafting(self, exit_layer: int, num_drafts: int) -> float:
        return num_drafts * (exit_layer * self.layer_seconds[0] + self.look(exit_layer))

    def round(self, exit_layer: int, num_drafts: int) -> float:
        """num_drafts + 1 rows through E layers one by one, num_drafts looks, then L - E layers and the head over all."""
        rows = num_drafts + 1
        drafting = self.drafting(exit_layer, num_drafts) + exit_layer * self.layer_seconds[0]
        verifying = (self.num_layers - exit_layer) * _at(self.layer_seconds, rows) + _at(self.head_seconds, rows)
        return drafting + verifying + self.round_seconds

    def copying(self, exit_layer: int, tried: int, kept: int) -> float:
        return self._copying(exit_layer, tried + 1, kept + 1)

    def _copying(self, exit_layer: int, tried_rows: int, kept_rows: int) -> float:
        """Seconds of all rows of a pass."""
        seconds = (self.num_layers - exit_layer) * _at(self.layer_seconds, kept_rows) + _at(
            self.head_seconds, kept_rows
        )
        if exit_layer:
            look = _at(self.head_seconds, tried_rows) + self.draft_seconds + self.adapter(exit_layer)
            seconds += exit_layer * _at(self.layer_seconds, tried_rows) + max(look, 0.0) + self.round_seconds
        return seconds

    def for_batch_size(self, texts: int) -> CostModel:
        """A draft step then runs a row of each text, and a verification all their rows."""
        return self if texts == 1 else BatchedCost(self, texts)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON record; `MeasuredCost.from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MeasuredCost:
        """The cost that `as_dict` described."""
        lists = {name: tuple(values[name]) for name in ("layer_seconds", "head_seconds")}
        adapters = tuple((int(layer), float(seconds)) for layer, seconds in values.get("adapter_seconds", ()))
        return cls(**{**values, **lists, "adapter_seconds": adapters})


DRAFTING_ON = 0.25
"""Share of the other texts that still draft when a text drafts a second token: each stops by its own confidence."""


@dataclass(frozen=True, slots=True)
class BatchedCost:
    """What each of `texts` texts pays for its part of passes that they share.

    Few rows cost little more than one, since the weights are read once; many cost what their arithmetic costs. So plain steps
    become cheap in a batch, and drafts gain less, down to nothing. All draft from one exit and verify together; they stop
    drafting at different tokens, so the later steps of a draft are shared by few (`DRAFTING_ON`).
    """

    alone: MeasuredCost
    texts: int

    @property
    def num_layers(self) -> int:
        return self.alone.num_layers

    def autoregressive(self) -> float:
        return self._pass(self.num_layers, self.texts) + _at(self.alone.head_seconds, self.texts) / self.texts

    def look(self, exit_layer: int) -> float:
        """The first one of a draft, which all share."""
        return self._look(exit_layer, self.texts)

    def drafting(self, exit_layer: int, num_drafts: int) -> float:
        """All share the first step, few the others."""
        if num_drafts == 0:
            return 0.0
        fewer = 1 + (self.texts - 1) * DRAFTING_ON
        later = exit_layer * _at(self.alone.layer_seconds, fewer) / fewer + self._look(exit_layer, fewer)
        return self._pass(exit_layer, self.texts) + self._look(exit_layer, self.texts) + (num_drafts - 1) * later

    def round(self, exit_layer: int, num_drafts: int) -> float:
        """The drafts' steps, a pass of the last rows that all share, and a verification of all rows together."""
        rows = (num_drafts + 1) * self.texts
        drafting = self.drafting(exit_layer, num_drafts) + self._pass(exit_layer, self.texts)
        verifying = self._pass(self.num_layers - exit_layer, rows) + _at(self.alone.head_seconds, rows) / self.texts
        return drafting + verifying + self.alone.round_seconds / self.texts

    def copying(self, exit_layer: int, tried: int, kept: int) -> float:
        """All copy alike."""
        return self.alone._copying(exit_layer, self.texts * (tried + 1), self.texts * (kept + 1)) / self.texts

    def _look(self, exit_layer: int, texts: float) -> float:
        head = _at(self.alone.head_seconds, texts)
        return (max(head + self.alone.draft_seconds, 0.1 * head) + self.alone.adapter(exit_layer)) / texts

    def for_batch_size(self, texts: int) -> CostModel:
        return self.alone.for_batch_size(texts)

    def _pass(self, layers: int, rows: int) -> float:
        """A text's share of the cost of these layers over these rows."""
        return layers * _at(self.alone.layer_seconds, rows) / self.texts


@dataclass(frozen=True, slots=True)
class PacerCost:
    """A cost with Pacer's pre-verifier added: a pass after every `block` drafts.

    pass_cost: of one pass, in the unit of `cost`; None for a layer, the L-th part of a plain step.
    """

    cost: CostModel
    block: int
    pass_cost: float | None = None

    @property
    def num_layers(self) -> int:
        return self.cost.num_layers

    def autoregressive(self) -> float:
        return self.cost.autoregressive()

    def look(self, exit_layer: int) -> float:
        return self.cost.look(exit_layer)

    def drafting(self, exit_layer: int, num_drafts: int) -> float:
        return self.cost.drafting(exit_layer, num_drafts)

    def round(self, exit_layer: int, num_drafts: int) -> float:
        """With num_drafts // block passes: a block cut short is not judged."""
        each = self.cost.autoregressive() / self.cost.num_layers if self.pass_cost is None else self.pass_cost
        return self.cost.round(exit_layer, num_drafts) + num_drafts // self.block * each

    def copying(self, exit_layer: int, tried: int, kept: int) -> float:
        """Copied tokens are not judged."""
        return self.cost.copying(exit_layer, tried, kept)

    def for_batch_size(self, texts: int) -> PacerCost:
        """Each text's pre-verifier runs by itself."""
        return replace(self, cost=self.cost.for_batch_size(texts), pass_cost=self.pass_cost)


def _at(seconds: Sequence[float], rows: float) -> float:
    """Entry for `rows` rows, between two the line between them, and beyond the last that of the last two (never falling)."""
    if rows >= len(seconds):
        return seconds[-1] + max(seconds[-1] - seconds[-2], 0.0) * (rows - len(seconds))
    below = seconds[int(rows) - 1]
    return below + (rows - int(rows)) * (seconds[int(rows)] - below)


def draft_passes(record: RoundRecord) -> tuple[int, bool]:
    """(Passes through the exit's layers that were looked at, whether verification finds all rows there already).

    What was copied goes through them in one pass. Where drafting stopped before a draw, or nothing was drafted after a copy,
    the last row was looked at too; else verification runs that row through the first layers.
    """
    if record.exit_layer is None:
        return 0, False
    drafted = record.num_drafted - record.num_copied
    complete = record.stop_cause == "before_draw" or (record.num_tried > 0 and drafted == 0)
    return drafted + complete, complete


def cost_of_round(record: RoundRecord, cost: CostModel) -> float:
    """What a finished round costs by this cost: the rows that it ran, those that were dropped or cut among them."""
    if record.exit_layer is None:
        return cost.copying(0, record.num_drafted, record.num_drafted)
    layer, drafted = record.exit_layer, record.num_drafted - record.num_copied
    passes, complete = draft_passes(record)
    if not record.num_tried:
        return cost.round(layer, drafted) + complete * cost.look(layer)
    looks_less = drafted - (passes - 1)  # the pass of the copy has looked at the row that the first draft comes from
    drafting = cost.drafting(layer, drafted) - looks_less * cost.look(layer)
    return cost.copying(layer, record.num_tried, record.num_drafted) + drafting


def tokens_per_cost(acceptance: float, exit_layer: int, num_drafts: int, cost: CostModel) -> float:
    """Expected tokens of a round divided by its cost; with `LayerCost` DEL's TPL(l, d).

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
    """The (exit layer, length, tokens per cost) with most tokens per cost; lengths first .. max_speculations.

    acceptance: of every candidate exit layer. Of equals the lowest layer wins, then the shortest length.
    """
    layers = tuple(sorted(acceptance))
    if not layers or first > max_speculations:
        raise ValueError("there must be at least one candidate exit layer and one length")
    assert isinstance(cost, Hashable)
    costs = _round_costs(cost, layers, max_speculations)
    powers = np.ones(costs.shape)
    powers[:, 1:] = np.array([acceptance[layer] for layer in layers])[:, None]
    rates = (powers.cumprod(axis=1).cumsum(axis=1) / costs)[:, first:]
    index, length = divmod(int(rates.argmax()), rates.shape[1])
    return layers[index], first + length, float(rates[index, length])


@lru_cache(maxsize=64)
def _round_costs(cost: Hashable, layers: tuple[int, ...], max_speculations: int) -> NDArray[np.float64]:
    """Cost of a round per exit layer and length 0 .. max_speculations; length 0 is a plain step."""
    model = cast(CostModel, cost)
    for layer in layers:
        check_exit_layer(layer, model.num_layers)
    lengths = range(1, max_speculations + 1)
    return np.array([[model.autoregressive(), *(model.round(layer, d) for d in lengths)] for layer in layers])
