"""DEL: exit layer by expected tokens per layer (TPL), dynamic confidence threshold, both from shadow tokens.

`del` does what the authors' released code does, `del:as=printed` what the paper's Algorithm 1 says.
"""

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
LENGTHS = ("max", "tpl")
READINGS = ("released", "printed")
_MAX_WAITING = 256  # rows of a layer: their hidden states are kept until then
_ROUNDING = 1e-9  # by which a bound may be too low
_FORGOTTEN = 1e-300  # of rows so long ago a float keeps too little for a mean


@dataclass(frozen=True, slots=True)
class _Rows:
    """Hold what is learned at once: the first `count` rows of these shadow tokens, which follow each other."""

    parts: tuple[Shadow, ...]
    count: int

    def of(self, layer: int) -> list[tuple[bool, float]]:
        """As `Shadow.rows_of`."""
        return [row for part in self.parts for row in part.rows_of(layer)][: self.count]


class DecayedMatches:
    """Decayed sums over updates, per layer: rows that matched and rows that did not, and the confidences of both.

    An update's shadow tokens are only asked for when something depends on them: until then a layer's updates wait, and
    `max_accepted` says what they could come to at most. Results are the same as if every update were learned at once.
    Deviation: eq. 2 divides the matches c_r by u_r, which leaves out a row, so that the ratio can exceed 1. Here, as in the
    released code, they are divided by the rows among which they are counted.
    Source: DEL (Entezari Zarch et al. 2025), section 4.2 and Algorithm 1, lines 20 to 23.
    """

    def __init__(self, layers: Iterable[int], omega: float) -> None:
        if not 0 < omega <= 1:
            raise ValueError(f"omega must be in (0, 1], got {omega}")
        self.layers = tuple(layers)
        self._omega = omega
        self.reset()

    def reset(self) -> None:
        self._of = {layer: _LayerSums() for layer in self.layers}

    def observe(self, *parts: Shadow, count: int | None = None) -> None:
        """Learn from the first `count` rows of these shadow tokens, all by default, as one update."""
        rows = _Rows(parts, sum(part.num_rows for part in parts) if count is None else count)
        for layer in parts[0].layers:
            if layer in self._of:
                own = self._of[layer]
                own.waiting.append(rows)
                own.most = own.most * self._omega + rows.count
                own.rows = own.rows * self._omega + rows.count
                own.rows_waiting += rows.count
                if own.rows_waiting > _MAX_WAITING:
                    self._learn(layer)

    def _learn(self, layer: int) -> _LayerSums:
        """Return the layer's sums, with all its updates in them."""
        own = self._of[layer]
        if not own.waiting:
            return own
        first, *others = (part for update in own.waiting for part in update.parts)
        if others:
            first.compute(layer, others)
        for update in own.waiting:
            rows = update.of(layer)
            for kind in (True, False):
                sure = [confidence for match, confidence in rows if match == kind]
                own.counts[kind] = own.counts[kind] * self._omega + len(sure)
                own.confidence[kind] = own.confidence[kind] * self._omega + sum(sure)
        own.waiting, own.rows_waiting, own.most = [], 0, own.counts[True]
        return own

    def knows(self, layer: int) -> bool:
        """Tell whether no update of this layer waits."""
        return not self._of[layer].waiting

    def max_accepted(self, layer: int) -> float | None:
        """Return what `acceptance` can come to at most; itself if nothing waits. None before any row was compared."""
        own = self._of[layer]
        return self.acceptance(layer) if self.knows(layer) else min(own.most / own.rows + _ROUNDING, 1.0)

    def acceptance(self, layer: int) -> float | None:
        """alpha: matched over compared rows, in [0, 1]; None before any was compared."""
        counts = self._learn(layer).counts
        return counts[True] / sum(counts) if sum(counts) else None

    def threshold(self, layer: int) -> float | None:
        """tau: half of the mean confidences of matched and of mismatched rows; None while one kind was never seen.

        The paper and its code divide 0 by 0 there. That is not a number, and no confidence is below it.
        """
        own = self._learn(layer)
        if min(own.counts) < _FORGOTTEN:
            return None
        return sum(total / count for total, count in zip(own.confidence, own.counts)) / 2


@dataclass(slots=True)
class _LayerSums:
    """What is known of one layer. waiting: updates that are not in its sums yet, of `rows_waiting` rows.

    counts, confidence: decayed, of the rows that did not match and of those that did. most, rows: decayed, how many would
    match if all that waits did, and of how many.
    """

    counts: list[float] = field(default_factory=lambda: [0.0, 0.0])
    confidence: list[float] = field(default_factory=lambda: [0.0, 0.0])
    most: float = 0.0
    rows: float = 0.0
    waiting: list[_Rows] = field(default_factory=list)
    rows_waiting: int = 0


class DelEstimates(StatelessPolicy):
    """What DEL decides by (`current`), from a prompt's last rows and from a text's rounds.

    layers: those to learn. first_layer: where the release drafts its first token, while it reads the prompt. If that token is
        right, the row of the first new token belongs to the prompt's update, and `waits` until a plain step has run it. None
        for a stopping policy, which plans no step. printed: the prompt decides the first round alone, since Algorithm 1 then
        starts with empty lists. Else it is the first update of the same sums. A new text begins afresh.
    Source: DEL (Entezari Zarch et al. 2025), Algorithm 1, lines 1, 4 and 20; Appendix B.2 for the 32 rows; its release.
    """

    _open: Shadow | None

    def __init__(
        self, layers: Iterable[int], *, omega: float = OMEGA, printed: bool = False, first_layer: int | None = None
    ) -> None:
        self.rounds = DecayedMatches(layers, omega)
        self.layers = self.rounds.layers
        self.printed = printed
        self._prompt = DecayedMatches(self.layers, omega)
        self._first_layer = None if printed else first_layer
        self.reset()

    @property
    def prompt_rows(self) -> int:
        """Rows of the prompt that are learned: in the release 32 before the last one, in the paper 32."""
        return PROMPT_ROWS + (not self.printed)

    @property
    def waits(self) -> bool:
        """Return whether the prompt's update lacks the row of the first new token."""
        return self._open is not None

    def begin_text(self) -> None:
        self.reset()

    def observe_prompt(self, shadow: Shadow) -> None:
        if self.printed:
            self._prompt.observe(shadow)
            self.current = self._prompt
        elif self._first_layer is not None and shadow.rows_of(self._first_layer)[-1][0]:
            self._open = shadow
        else:
            self.rounds.observe(shadow)

    def observe(self, record: RoundRecord) -> None:
        """Learn a round's rows up to the first at which the exit that drafted was wrong, or all of them without `cuts`.

        When sampling, a draft may be rejected where the argmaxes are the same, and accepted where they differ.
        """
        if record.shadow is None:
            return
        sampled = record.shadow.acceptance_probabilities is not None
        parts = [record.shadow]
        if record.rejected is not None and (sampled or not self.cuts):
            parts.append(record.rejected)
        count = sum(part.num_rows for part in parts)
        if sampled and self.cuts and record.exit_layer in record.shadow.layers:
            matches = [match for match, _ in _Rows(tuple(parts), count).of(record.exit_layer)]
            count = matches.index(False) + 1 if False in matches else count
        if self._open is not None:
            count += self._open.num_rows
            parts.insert(0, self._open)
            self._open = None
        self.rounds.observe(*parts, count=count)
        self.current = self.rounds

    def reset(self) -> None:
        self.rounds.reset()
        self._prompt.reset()
        self.current = self.rounds
        self.cuts = True
        self._open = None


class DelExit(DelegatingPolicy):
    """Exit at the layer whose TPL(l, d) is highest over all candidate layers and lengths d.

    layers: candidates; None for all of 1 .. L-1. cost: `LayerCost` is the paper's; a `MeasuredCost` maximises tokens a
        second instead. length: "max" drafts up to d_max and leaves the end to a stopping policy (Algorithm 1), "tpl" drafts
        the d of the maximum, and 0 is a plain step. printed: as Algorithm 1 says it, with lengths 0 .. d_max. The release
        compares 0 .. d_max - 1, and counts all rows of a round that was planned with d = 0.
    The release reads the prompt and verifies one draft of layer 1 in one pass. Here that pass is the prompt's, and a plain
    step where layer 1 was right.
    Source: DEL (Entezari Zarch et al. 2025), sections 4.1 to 4.3 and Algorithm 1, lines 1 and 19 to 24; its release.
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
        printed: bool = False,
    ) -> None:
        if length not in LENGTHS:
            raise ValueError(f"length must be one of {', '.join(LENGTHS)}, got {length!r}")
        check_number("d_max (max_speculations)", max_speculations, 1, MAX_DRAFTS)
        self.exit_layers = check_layers(tuple(range(1, num_layers) if layers is None else layers), num_layers)
        self.estimates = self.learner = DelEstimates(
            self.exit_layers, omega=omega, printed=printed, first_layer=self.exit_layers[0]
        )
        self.observes = _observed(self.estimates)
        self._cost = cost or LayerCost(num_layers)
        self._max_speculations, self._length = max_speculations, length
        self._longest = max_speculations if printed else max_speculations - 1

    @classmethod
    def from_args(cls, setup: Setup, *, cost: str = "layers", d_max: int = MAX_SPECULATIONS, **options: Any) -> DelExit:
        named = _named(options)
        return cls(num_layers=setup.num_layers, cost=setup.cost(cost), max_speculations=d_max, **named)

    def default_stopping(self) -> DelThreshold | None:
        """Make the threshold that ends its drafts; None where it plans their length (length=tpl)."""
        if self._length == "tpl":
            return None
        return DelThreshold(num_layers=self._cost.num_layers, shared=self.estimates)

    def plan(self, context: RoundContext) -> Plan:
        """Choose the layer of the highest TPL; before anything was seen, the lowest candidate with one draft."""
        cost = self._cost = self._cost.for_batch_size(context.batch_size)
        if self.estimates.waits:
            return Plan(exit_layer=None, max_speculations=0)
        known = self._contenders(cost)
        if not known:
            return Plan(exit_layer=self.exit_layers[0], max_speculations=1)
        exit_layer, length, _ = best_setting(known, self._longest, cost)
        self.estimates.cuts = length > 0 or self.estimates.printed
        acceptance = {Drafter(layer): rate for layer, rate in known.items()}
        cap = self._max_speculations if self._length == "max" else length
        return Plan(exit_layer=exit_layer if cap else None, max_speculations=cap, acceptance=acceptance)

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
            layer, _, _ = best_setting(bounds, self._longest, cost)
            if estimates.knows(layer):
                return {layer: value for layer, value in bounds.items() if estimates.knows(layer)}
            exact = estimates.acceptance(layer)
            assert exact is not None
            bounds[layer] = exact


class DelThreshold(DelegatingPolicy, NeverStop):
    """Draft until a confidence is below tau of its exit layer. The token is kept, and verified.

    Confidence is the top-1 probability. When sampling it is the drawn token's own, under temperature, top-k and top-p.
    layers: that drafts may come from; None for all. printed: Algorithm 1 does not draw the token, and its confidence is
        always the top-1 probability. shared: the estimates of the `DelExit` that runs with it and updates them. Without them
        it keeps its own.
    Deviation: eq. 3 divides the confidence of mismatched rows by S(u - c), which leaves out a row of every round and is 0 or
    less at a good layer. Here, as in the release, it is divided by their number.
    Source: DEL (Entezari Zarch et al. 2025), section 4.4 and Algorithm 1, lines 9 and 28; its release.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        layers: Iterable[int] | None = None,
        omega: float = OMEGA,
        printed: bool = False,
        shared: DelEstimates | None = None,
    ) -> None:
        self.learner: Learner = StatelessPolicy()
        if shared is None:
            candidates = check_layers(tuple(range(1, num_layers) if layers is None else layers), num_layers)
            shared = self.learner = DelEstimates(candidates, omega=omega, printed=printed)
        self.estimates = shared
        self.observes = _observed(shared) | ObservationSpec(confidence=True, probability=not shared.printed)

    @classmethod
    def from_args(cls, setup: Setup, **options: Any) -> DelThreshold:
        return cls(num_layers=setup.num_layers, layers=setup.layers_to_learn, **_named(options))

    def stop_before_draw(self, row: DraftRow) -> bool:
        return self.estimates.printed and self._below(row, row.confidence)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        sure = row.confidence if row.probability is None else row.probability
        return not self.estimates.printed and self._below(row, sure)

    def threshold(self, drafter: Drafter) -> float | None:
        """Return the current tau of a layer, in [0, 1]; None where nothing stops."""
        return self.estimates.current.threshold(drafter.exit_layer)

    def _below(self, row: DraftRow, sure: float | None) -> bool:
        tau = self.threshold(row.drafter)
        assert sure is not None
        return tau is not None and sure < tau


def _observed(estimates: DelEstimates) -> ObservationSpec:
    return ObservationSpec(shadow_layers=estimates.layers, prompt_rows=estimates.prompt_rows, rejected_rows=True)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Read the `as=` of a name."""
    reading = options.pop("as", READINGS[0])
    if reading not in READINGS:
        raise ValueError(f"as must be one of {', '.join(READINGS)}, got {reading!r}")
    return {**options, "printed": reading == "printed"}
