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
STATES = ("fresh", "kept")
PROMPTS = ("first", "counted")
ALPHAS = ("rows", "paper")
_MAX_WAITING = 256  # rows of a layer: their hidden states are kept until then
_ROUNDING = 1e-9  # by which a bound may be too low
_MAX_ALPHA = 1000.0  # of the paper's ratio: its powers up to MAX_DRAFTS stay finite


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
    alpha: what the matches c_r are divided by. "rows": the rows n_r = u_r + 1 among which they are counted. "paper": u_r, as
    eq. 2 is printed, so that the ratio can exceed 1; n_r is taken while S(u) = 0, where the paper divides by 0.
    Source: DEL (Entezari Zarch et al. 2025), section 4.2 and Algorithm 1, lines 20 to 23.
    """

    def __init__(self, layers: Iterable[int], omega: float, alpha: str = "rows") -> None:
        if not 0 < omega <= 1:
            raise ValueError(f"omega must be in (0, 1], got {omega}")
        if alpha not in ALPHAS:
            raise ValueError(f"alpha must be one of {', '.join(ALPHAS)}, got {alpha!r}")
        self.layers = tuple(layers)
        self._omega = omega
        self._names = _MEANS if alpha == "rows" else (*_MEANS, "valid")
        self.reset()

    def reset(self) -> None:
        self._of = {layer: _LayerMeans() for layer in self.layers}

    def observe(self, shadow: Shadow, left_out: int = 1) -> None:
        """Learn from a round. left_out: its rows that u_r leaves out, which is the last one; none of a prompt's."""
        rows = shadow.num_rows
        for layer in shadow.layers:
            if layer in self._of:
                own = self._of[layer]
                own.waiting.append(shadow)
                own.most.add(rows, rows, self._omega)
                own.valid.add(rows - left_out, 0.0, self._omega)
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
        return self._over_valid(own, own.most, min(own.most.mean + _ROUNDING, 1.0))

    def acceptance(self, layer: int) -> float | None:
        """alpha: matched over compared rows, in [0, 1], or with alpha="paper" at least 0; None before any was compared."""
        own = self._learn(layer)
        if own.matches.mean is None:
            return None
        return self._over_valid(own, own.matches, min(max(own.matches.mean, 0.0), 1.0))

    def _over_valid(self, own: _LayerMeans, counted: DecayedMean, mean: float) -> float:
        """S(c) / S(n), which is given, as S(c) / S(u) if the paper's alpha was asked for."""
        if "valid" not in self._names or own.valid.weight == 0:
            return mean
        return min(mean * counted.weight / own.valid.weight, _MAX_ALPHA)

    def threshold(self, layer: int) -> float:
        """tau: half of the mean confidences of matched and of mismatched rows.

        If there is only one kind, its mean; before any row, the default. The paper divides 0 by 0 there.
        """
        own = self._learn(layer)
        seen = [kind.mean for kind in (own.matched, own.mismatched) if kind.mean is not None]
        return sum(seen) / len(seen) if seen else DEFAULT_THRESHOLD

    def state(self) -> dict[str, Any]:
        """[weight, mean] of the means per layer, for JSON."""
        known = {layer: self._learn(layer) for layer in self.layers}
        return {
            name: {str(layer): [getattr(own, name).weight, getattr(own, name).mean] for layer, own in known.items()}
            for name in self._names
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. Raises ValueError if it is for other layers, or from another version."""
        if missing := [name for name in self._names if name not in state]:
            raise ValueError(f"the saved state lacks {', '.join(missing)}: it was saved by another version")
        for name in self._names:
            if (saved := {int(layer) for layer in state[name]}) != set(self.layers):
                raise ValueError(
                    f"the saved state is for exit layers {sorted(saved)}, this policy for {list(self.layers)}"
                )

        def mean(name: str, layer: int) -> DecayedMean:
            weight, value = state[name][str(layer)]
            return DecayedMean(float(weight), value)

        self._of = {
            layer: _LayerMeans(most=mean("matches", layer), **{name: mean(name, layer) for name in self._names})
            for layer in self.layers
        }


_MEANS = ("matches", "matched", "mismatched")


@dataclass(slots=True)
class _LayerMeans:
    """What is known of one layer. waiting: rounds that are not in its means yet, of `rows_waiting` rows."""

    matches: DecayedMean = field(default_factory=DecayedMean)  # S(c) / S(n)
    matched: DecayedMean = field(default_factory=DecayedMean)  # S(tcs) / S(c)
    mismatched: DecayedMean = field(default_factory=DecayedMean)  # S(fcs) / S(n - c)
    most: DecayedMean = field(default_factory=DecayedMean)  # S(c) / S(n) if all that waits matched
    valid: DecayedMean = field(default_factory=DecayedMean)  # its weight is S(u), what waits included
    waiting: list[Shadow] = field(default_factory=list, init=False)
    rows_waiting: int = field(default=0, init=False)


class DelEstimates:
    """What DEL decides by (`current`): a prompt's last rows in a text's first round, and from then on the rounds.

    layers: those to learn. state: "fresh" forgets the rounds when a new text begins, as Algorithm 1 starts with empty lists;
    "kept" goes on with those of earlier texts. prompt: "first" uses the prompt's rows for the first round only, "counted"
    makes them a round among the others. alpha: see `DecayedMatches`.
    Source: DEL (Entezari Zarch et al. 2025), Algorithm 1, lines 1 and 4; Appendix B.2 for the 32 rows.
    """

    def __init__(
        self,
        layers: Iterable[int],
        *,
        omega: float = OMEGA,
        state: str = "fresh",
        prompt: str = "first",
        alpha: str = "rows",
    ) -> None:
        for name, value, choices in (("state", state, STATES), ("prompt", prompt, PROMPTS)):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        self.rounds = DecayedMatches(layers, omega, alpha)
        self.layers = self.rounds.layers
        self._prompt = DecayedMatches(self.layers, omega, alpha)
        self._forgets = state == "fresh"
        self._counts_prompt = prompt == "counted"
        self.current = self.rounds

    def begin_text(self) -> None:
        self.current = self.rounds
        if self._forgets:
            self.rounds.reset()

    def observe_prompt(self, shadow: Shadow) -> None:
        if self._counts_prompt:
            self.rounds.observe(shadow, left_out=0)
            return
        self._prompt.reset()
        self._prompt.observe(shadow, left_out=0)
        self.current = self._prompt

    def observe(self, record: RoundRecord) -> None:
        if record.shadow is not None:
            self.rounds.observe(record.shadow)
            self.current = self.rounds

    def reset(self) -> None:
        self.rounds.reset()
        self.current = self.rounds

    def state(self) -> dict[str, Any]:
        """Return what lasts from one text to the next: the rounds' means if they are kept, else nothing."""
        return {} if self._forgets else self.rounds.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. Raises ValueError if it does not fit, or if this policy forgets at every prompt."""
        if not self._forgets:
            self.rounds.restore(state)
        elif state:
            raise ValueError("del forgets at every prompt and takes up no saved state: say state=kept")


class DelExit(DelegatingPolicy):
    """Exit at the layer whose TPL(l, d) is highest over all candidate layers and lengths 0 .. d_max.

    layers: candidates; None for all of 1 .. L-1. cost: `LayerCost` is the paper's; a `MeasuredCost` maximises tokens a
        second instead. length: "max" drafts up to d_max and leaves the end to a stopping policy (Algorithm 1), "tpl" drafts
        the d of the maximum. no_speculation: whether a maximum at d = 0 means a plain step; the paper does not say.
        state, prompt, alpha: see `DelEstimates`.
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
        state: str = "fresh",
        prompt: str = "first",
        alpha: str = "rows",
    ) -> None:
        if length not in LENGTHS:
            raise ValueError(f"length must be one of {', '.join(LENGTHS)}, got {length!r}")
        check_number("d_max (max_speculations)", max_speculations, 1, MAX_DRAFTS)
        self.exit_layers = check_layers(tuple(range(1, num_layers) if layers is None else layers), num_layers)
        self.estimates = self.learner = DelEstimates(
            self.exit_layers, omega=omega, state=state, prompt=prompt, alpha=alpha
        )
        self.observes = ObservationSpec(shadow_layers=self.exit_layers, prompt_rows=PROMPT_ROWS)
        self._cost = cost or LayerCost(num_layers)
        self._max_speculations = max_speculations
        self._length = length
        self._first_length = 0 if no_speculation else 1

    @classmethod
    def from_args(cls, setup: Setup, *, cost: str = "layers", d_max: int = MAX_SPECULATIONS, **options: Any) -> DelExit:
        return cls(num_layers=setup.num_layers, cost=setup.cost(cost), max_speculations=d_max, **options)

    def default_stopping(self, on_stop: str = "drop") -> DelThreshold | None:
        """Make the threshold that ends its drafts; None where it plans their length (length=tpl)."""
        if self._length == "tpl":
            return None
        return DelThreshold(num_layers=self._cost.num_layers, on_stop=on_stop, shared=self.estimates)

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
    "keep" draws and verifies the token (what code that descends from the authors' release does). state, prompt: see
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
        state: str = "fresh",
        prompt: str = "first",
        shared: DelEstimates | None = None,
    ) -> None:
        if on_stop not in ON_STOP:
            raise ValueError(f"on_stop must be one of {', '.join(ON_STOP)}, got {on_stop!r}")
        self.learner: Learner = StatelessPolicy()
        if shared is None:
            candidates = check_layers(tuple(range(1, num_layers) if layers is None else layers), num_layers)
            shared = self.learner = DelEstimates(candidates, omega=omega, state=state, prompt=prompt)
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
