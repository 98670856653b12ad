"""DEL: exit layer by expected tokens per layer (TPL), dynamic confidence threshold, both from shadow tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from policies.base import DelegatingPolicy, Learner, NeverStop, StatelessPolicy
from policies.bounds import MAX_DRAFTS, check_layers, check_number
from policies.building import Setup
from policies.cost import CostModel, LayerCost, best_setting
from policies.records import Drafter, DraftRow, ObservationSpec, Plan, RoundContext, RoundRecord, Shadow

MAX_SPECULATIONS = 18  # d_max
OMEGA = 0.95
PROMPT_ROWS = 32
DEFAULT_THRESHOLD = 0.5  # before any row was seen
ON_STOP = ("drop", "keep")
LENGTHS = ("max", "tpl")
PROMPTS = ("first", "counted")
_MAX_WAITING = 256  # rows of a layer: their hidden states are kept until then
_ROUNDING = 1e-9  # by which a bound may be too low


@dataclass(slots=True)
class DecayedMean:
    """S(x) / S(n): the mean of all values seen, each round's weighing omega times as much as the next one's.

    Kept as that ratio and S(n). Rounds without a value let both sums fade alike, so the mean stays as it is however long ago
    the last value was, where two sums would end as 0 / 0.
    """

    weight: float = 0.0
    mean: float | None = None

    def add(self, count: float, total: float, omega: float) -> None:
        """One round: `count` values that sum to `total`."""
        self.weight *= omega
        if count:
            self.weight += count
            before = self.mean or 0.0
            self.mean = before + (total - count * before) / self.weight


class DecayedMatches:
    """Decayed means over rounds, per layer: how many rows matched, and the confidence of those that did and did not.

    A round's shadow tokens are only asked for when something depends on them: until then a layer's rounds wait, and
    `max_accepted` says what they could come to at most. Results are the same as if every round were learned at once.
    Deviation: eq. 2 divides the matches c_r by u_r, which leaves out a row, so that the ratio can exceed 1. Here they are
    divided by the rows n_r = u_r + 1 among which they are counted.
    Source: DEL (Entezari Zarch et al. 2025), section 4.2 and Algorithm 1, lines 20 to 23.
    """

    def __init__(self, layers: Iterable[int], omega: float) -> None:
        if not 0 < omega <= 1:
            raise ValueError(f"omega must be in (0, 1], got {omega}")
        self.layers = tuple(layers)
        self._omega = omega
        self.reset()

    def reset(self) -> None:
        self._of = {layer: _LayerMeans() for layer in self.layers}

    def observe(self, shadow: Shadow) -> None:
        """Learn from a round, or from a prompt's rows."""
        rows = shadow.num_rows
        for layer in shadow.layers:
            if layer in self._of:
                own = self._of[layer]
                own.waiting.append(shadow)
                own.most.add(rows, rows, self._omega)
                own.rows_waiting += rows
                if own.rows_waiting > _MAX_WAITING:
                    self._learn(layer)

    def _learn(self, layer: int) -> _LayerMeans:
        """Return the layer's means, with all its rounds in them."""
        own = self._of[layer]
        if not own.waiting:
            return own
        if len(own.waiting) > 1:
            own.waiting[0].compute(layer, own.waiting[1:])
        for shadow in own.waiting:
            rows = shadow.rows_of(layer)
            right = [confidence for match, confidence in rows if match]
            wrong = [confidence for match, confidence in rows if not match]
            own.matches.add(len(rows), len(right), self._omega)
            own.matched.add(len(right), sum(right), self._omega)
            own.mismatched.add(len(wrong), sum(wrong), self._omega)
        own.waiting, own.rows_waiting = [], 0
        own.most = DecayedMean(own.matches.weight, own.matches.mean)
        return own

    def knows(self, layer: int) -> bool:
        """Tell whether no round of this layer waits."""
        return not self._of[layer].waiting

    def max_accepted(self, layer: int) -> float | None:
        """Return what `acceptance` can come to at most; itself if nothing waits. None before any row was compared."""
        own = self._of[layer]
        if own.most.mean is None or self.knows(layer):
            return self.acceptance(layer)
        return min(own.most.mean + _ROUNDING, 1.0)

    def acceptance(self, layer: int) -> float | None:
        """alpha: matched over compared rows, in [0, 1]; None before any was compared."""
        mean = self._learn(layer).matches.mean
        return None if mean is None else min(max(mean, 0.0), 1.0)

    def threshold(self, layer: int) -> float:
        """tau: half of the mean confidences of matched and of mismatched rows.

        If there is only one kind, its mean; before any row, the default. The paper divides 0 by 0 there.
        """
        own = self._learn(layer)
        seen = [kind.mean for kind in (own.matched, own.mismatched) if kind.mean is not None]
        return sum(seen) / len(seen) if seen else DEFAULT_THRESHOLD


@dataclass(slots=True)
class _LayerMeans:
    """What is known of one layer. waiting: rounds that are not in its means yet, of `rows_waiting` rows."""

    matches: DecayedMean = field(default_factory=DecayedMean)  # S(c) / S(n)
    matched: DecayedMean = field(default_factory=DecayedMean)  # S(tcs) / S(c)
    mismatched: DecayedMean = field(default_factory=DecayedMean)  # S(fcs) / S(n - c)
    most: DecayedMean = field(default_factory=DecayedMean)  # S(c) / S(n) if all that waits matched
    waiting: list[Shadow] = field(default_factory=list, init=False)
    rows_waiting: int = field(default=0, init=False)


class DelEstimates(StatelessPolicy):
    """What DEL decides by (`current`): a prompt's last rows in a text's first round, and from then on the text's rounds.

    layers: those to learn. prompt: "first" uses the prompt's rows for the first round only, "counted" makes them one more
    round. A new text begins afresh, as Algorithm 1 starts with empty lists.
    Source: DEL (Entezari Zarch et al. 2025), Algorithm 1, lines 1 and 4; Appendix B.2 for the 32 rows.
    """

    def __init__(self, layers: Iterable[int], *, omega: float = OMEGA, prompt: str = "first") -> None:
        if prompt not in PROMPTS:
            raise ValueError(f"prompt must be one of {', '.join(PROMPTS)}, got {prompt!r}")
        self.rounds = DecayedMatches(layers, omega)
        self.layers = self.rounds.layers
        self._prompt = DecayedMatches(self.layers, omega)
        self._counts_prompt = prompt == "counted"
        self.current = self.rounds

    def begin_text(self) -> None:
        self.reset()

    def observe_prompt(self, shadow: Shadow) -> None:
        if self._counts_prompt:
            self.rounds.observe(shadow)
            return
        self._prompt.reset()
        self._prompt.observe(shadow)
        self.current = self._prompt

    def observe(self, record: RoundRecord) -> None:
        if record.shadow is not None:
            self.rounds.observe(record.shadow)
            self.current = self.rounds

    def reset(self) -> None:
        self.rounds.reset()
        self.current = self.rounds


class DelExit(DelegatingPolicy):
    """Exit at the layer whose TPL(l, d) is highest over all candidate layers and lengths 0 .. d_max.

    layers: candidates; None for all of 1 .. L-1. cost: `LayerCost` is the paper's; a `MeasuredCost` maximises tokens a
        second instead. length: "max" drafts up to d_max and leaves the end to a stopping policy (Algorithm 1), "tpl" drafts
        the d of the maximum. no_speculation: whether a maximum at d = 0 means a plain step; the paper does not say.
        prompt: see `DelEstimates`. on_stop: see `DelThreshold`.
    The first round is planned from the last 32 prompt positions.
    Source: DEL (Entezari Zarch et al. 2025), sections 4.1 to 4.3 and Algorithm 1, lines 1 and 19 to 24.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        layers: Iterable[int] | None = None,
        max_speculations: int = MAX_SPECULATIONS,
        omega: float = OMEGA,
        cost: CostModel | None = None,
        length: str = "max",
        no_speculation: bool = False,
        on_stop: str | None = None,
        prompt: str = "first",
    ) -> None:
        if length not in LENGTHS:
            raise ValueError(f"length must be one of {', '.join(LENGTHS)}, got {length!r}")
        if length == "tpl" and on_stop is not None:
            raise ValueError("on_stop= changes nothing with length=tpl, which drafts without a threshold")
        check_number("d_max (max_speculations)", max_speculations, 1, MAX_DRAFTS)
        self.exit_layers = check_layers(tuple(range(1, num_layers) if layers is None else layers), num_layers)
        self.estimates = self.learner = DelEstimates(self.exit_layers, omega=omega, prompt=prompt)
        self.observes = ObservationSpec(shadow_layers=self.exit_layers, prompt_rows=PROMPT_ROWS)
        self._cost = cost or LayerCost(num_layers)
        self._max_speculations = max_speculations
        self._length, self._on_stop = length, on_stop or "drop"
        self._first_length = 0 if no_speculation else 1

    @classmethod
    def from_args(cls, setup: Setup, *, cost: str = "layers", d_max: int = MAX_SPECULATIONS, **options: Any) -> DelExit:
        return cls(num_layers=setup.num_layers, cost=setup.cost(cost), max_speculations=d_max, **options)

    def default_stopping(self) -> DelThreshold | None:
        """Make the threshold that ends its drafts; None where it plans their length (length=tpl)."""
        if self._length == "tpl":
            return None
        return DelThreshold(num_layers=self._cost.num_layers, on_stop=self._on_stop, shared=self.estimates)

    def plan(self, context: RoundContext) -> Plan:
        """Choose the layer of the highest TPL; before anything was seen, the lowest candidate with one draft."""
        cost = self._cost = self._cost.for_batch_size(context.batch_size)
        known = self._contenders(cost)
        if not known:
            return Plan(exit_layer=self.exit_layers[0], max_speculations=1)
        exit_layer, length, _ = best_setting(known, self._max_speculations, cost, first=self._first_length)
        acceptance = {Drafter(layer): rate for layer, rate in known.items()}
        if length == 0:
            return Plan(exit_layer=None, max_speculations=0, acceptance=acceptance)
        cap = self._max_speculations if self._length == "max" else length
        return Plan(exit_layer=exit_layer, max_speculations=cap, acceptance=acceptance)

    def _contenders(self, cost: CostModel) -> dict[int, float]:
        """Return the acceptance of the layer that is best, and of others that were looked at on the way to it.

        A layer whose TPL could not be the highest even if all its unseen rows matched is not looked at: the choice is the
        same as with all of them.
        """
        estimates = self.estimates.current
        most = {layer: estimates.max_accepted(layer) for layer in self.exit_layers}
        bounds = {layer: value for layer, value in most.items() if value is not None}
        if not bounds:
            return {}
        while True:
            layer, _, _ = best_setting(bounds, self._max_speculations, cost, first=self._first_length)
            if estimates.knows(layer):
                return {layer: value for layer, value in bounds.items() if estimates.knows(layer)}
            exact = estimates.acceptance(layer)
            assert exact is not None
            bounds[layer] = exact


class DelThreshold(DelegatingPolicy, NeverStop):
    """Draft until a row's confidence is below tau of its exit layer.

    layers: that drafts may come from; None for all. on_stop: "drop" does not draw from that row (the paper's Algorithm 1),
    "keep" draws and verifies the token (what code that descends from the authors' release does). prompt: see
    `DelEstimates`. shared: the estimates of the `DelExit` that runs with it and updates them. Without them it keeps its own.
    Deviation: eq. 3 divides the confidence of mismatched rows by S(u - c), which leaves out a row of every round and is 0 or
    less at a good layer. Here it is divided by their number.
    Source: DEL (Entezari Zarch et al. 2025), section 4.4 and Algorithm 1, lines 9 and 28.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        layers: Iterable[int] | None = None,
        omega: float = OMEGA,
        on_stop: str = "drop",
        prompt: str = "first",
        shared: DelEstimates | None = None,
    ) -> None:
        if on_stop not in ON_STOP:
            raise ValueError(f"on_stop must be one of {', '.join(ON_STOP)}, got {on_stop!r}")
        self.learner: Learner = StatelessPolicy()
        if shared is None:
            candidates = check_layers(tuple(range(1, num_layers) if layers is None else layers), num_layers)
            shared = self.learner = DelEstimates(candidates, omega=omega, prompt=prompt)
        self.estimates = shared
        self.observes = ObservationSpec(confidence=True, shadow_layers=shared.layers, prompt_rows=PROMPT_ROWS)
        self._drops = on_stop == "drop"

    @classmethod
    def from_args(cls, setup: Setup, **options: Any) -> DelThreshold:
        return cls(num_layers=setup.num_layers, layers=setup.layers_to_learn, **options)

    def stop_before_draw(self, row: DraftRow) -> bool:
        return self._drops and self._below(row)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        return not self._drops and self._below(row)

    def threshold(self, drafter: Drafter) -> float:
        """Return the current tau of a layer, in [0, 1]."""
        return self.estimates.current.threshold(drafter.exit_layer)

    def _below(self, row: DraftRow) -> bool:
        assert row.confidence is not None
        return row.confidence < self.threshold(row.drafter)
