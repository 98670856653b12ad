"""DEL: exit layer by expected tokens per layer (TPL), dynamic confidence threshold, both from shadow tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from policies.base import NeverStop, check_layers
from policies.cost import CostModel, LayerCost, best_setting
from policies.records import DraftRow, Needs, Plan, RoundContext, RoundRecord, ShadowTokens

MAX_SPECULATIONS = 18  # d_max
OMEGA = 0.95
PROMPT_ROWS = 32
DEFAULT_THRESHOLD = 0.5  # before any row was seen
ON_STOP = ("drop", "keep")
LENGTHS = ("max", "tpl")


class DecayedMatches:
    """Exponentially decayed sums over rounds, per layer: compared and matched rows, and the confidences of both kinds.

    S(x) = sum_r omega^(R - r) x_r over rounds r = 1..R. Deviation from the paper: it divides the matches c_r, counted over
    u_r + 1 rows, by u_r, which can exceed 1 or divide by 0; here the compared rows n_r are counted on both sides.
    Source: DEL (Entezari Zarch et al. 2025), section 4.2 and Algorithm 1.
    """

    def __init__(self, layers: Iterable[int], omega: float) -> None:
        if not 0 < omega <= 1:
            raise ValueError(f"omega must be in (0, 1], got {omega}")
        self.layers = tuple(layers)
        self._omega = omega
        self.reset()

    def reset(self) -> None:
        """Forget all rounds."""
        zeros = dict.fromkeys(self.layers, 0.0)
        self.compared, self.matched = dict(zeros), dict(zeros)
        self.matched_confidence, self.mismatched_confidence = dict(zeros), dict(zeros)

    def observe(self, shadow: ShadowTokens) -> None:
        """Add one round."""
        matches = (shadow.tokens == shadow.target_tokens).float()
        columns = (
            shadow.layers,
            matches.sum(dim=1).tolist(),
            (shadow.confidences * matches).sum(dim=1).tolist(),
            (shadow.confidences * (1 - matches)).sum(dim=1).tolist(),
        )
        rows = matches.shape[1]
        for layer, matched, matched_confidence, mismatched_confidence in zip(*columns):
            if layer in self.compared:
                self.add(layer, rows, matched, matched_confidence, mismatched_confidence)

    def add(
        self, layer: int, compared: float, matched: float, matched_confidence: float, mismatched_confidence: float
    ) -> None:
        """Add one layer's sums of one round."""
        self.compared[layer] = self._omega * self.compared[layer] + compared
        self.matched[layer] = self._omega * self.matched[layer] + matched
        self.matched_confidence[layer] = self._omega * self.matched_confidence[layer] + matched_confidence
        self.mismatched_confidence[layer] = self._omega * self.mismatched_confidence[layer] + mismatched_confidence

    def acceptance(self, layer: int) -> float | None:
        """alpha: matched over compared rows, in [0, 1]; None before any was compared."""
        if self.compared[layer] == 0:
            return None
        return min(self.matched[layer] / self.compared[layer], 1.0)

    def threshold(self, layer: int) -> float:
        """tau: half of the mean confidences of matched and of mismatched rows.

        Of one kind alone its mean, before any row the documented default.
        """
        mismatched = self.compared[layer] - self.matched[layer]
        means = []
        if self.matched[layer] > 0:
            means.append(self.matched_confidence[layer] / self.matched[layer])
        if mismatched > 1e-9:  # a difference of sums: rounding may leave a trace where there is none
            means.append(self.mismatched_confidence[layer] / mismatched)
        return sum(means) / len(means) if means else DEFAULT_THRESHOLD

    def state(self) -> dict[str, Any]:
        """The four sums per layer, for JSON."""
        names = ("compared", "matched", "matched_confidence", "mismatched_confidence")
        return {name: {str(layer): value for layer, value in getattr(self, name).items()} for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. Raises ValueError if it is for other layers."""
        for name, values in state.items():
            sums = {int(layer): float(value) for layer, value in values.items()}
            if set(sums) != set(self.layers):
                raise ValueError(
                    f"the saved state is for exit layers {sorted(sums)}, this policy for {list(self.layers)}"
                )
            setattr(self, name, sums)


class DelExit:
    """Exit at the layer whose TPL(l, d) is highest over all candidate layers and lengths 0 .. d_max.

    layers: candidates; None for all of 1 .. L-1. cost: `LayerCost` is the paper's; a `MeasuredCost` maximises tokens a
        second instead. length: "max" drafts up to d_max and leaves the end to a stopping policy (Algorithm 1), "tpl" drafts
        the d of the maximum. no_speculation: whether a maximum at d = 0 means a plain step; the paper does not say.
    The first round learns from the last 32 prompt positions.
    Source: DEL (Entezari Zarch et al. 2025), section 4 and Algorithm 1.
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
    ) -> None:
        if length not in LENGTHS:
            raise ValueError(f"length must be one of {', '.join(LENGTHS)}, got {length!r}")
        if max_speculations < 1:
            raise ValueError(f"max_speculations must be at least 1, got {max_speculations}")
        candidates = check_layers(tuple(range(1, num_layers) if layers is None else layers), num_layers)
        self.matches = DecayedMatches(candidates, omega)
        self.needs = Needs(shadow_layers=candidates, prompt_rows=PROMPT_ROWS)
        self._cost = cost or LayerCost(num_layers)
        self._max_speculations = max_speculations
        self._length = length
        self._first_length = 0 if no_speculation else 1

    def plan(self, context: RoundContext) -> Plan:
        """The layer of the highest TPL; before anything was seen, the lowest candidate with one draft."""
        acceptance = {layer: self.matches.acceptance(layer) for layer in self.matches.layers}
        known = {layer: value for layer, value in acceptance.items() if value is not None}
        if not known:
            return Plan(exit_layer=self.matches.layers[0], max_speculations=1)
        exit_layer, length, _ = best_setting(known, self._max_speculations, self._cost, first=self._first_length)
        if length == 0:
            return Plan(exit_layer=None, max_speculations=0, acceptance=known)
        cap = self._max_speculations if self._length == "max" else length
        return Plan(exit_layer=exit_layer, max_speculations=cap, acceptance=known)

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        """The prompt's last positions are the first round."""
        self.matches.observe(shadow)

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round's shadow tokens."""
        if record.shadow is not None:
            self.matches.observe(record.shadow)

    def reset(self) -> None:
        """Forget all."""
        self.matches.reset()

    def state(self) -> dict[str, Any]:
        """The decayed sums."""
        return self.matches.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        self.matches.restore(state)


class DelThreshold(NeverStop):
    """Draft until a row's confidence is below tau of its exit layer.

    on_stop: "drop" does not draw from that row (the paper's Algorithm 1), "keep" draws and verifies the token (what code
    that descends from the authors' release does). shared: the sums of a `DelExit` that runs beside it and keeps them;
    without, it keeps its own for all layers.
    Source: DEL (Entezari Zarch et al. 2025), section 4.3 and Algorithm 1, lines 9 and 24.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        omega: float = OMEGA,
        on_stop: str = "drop",
        shared: DecayedMatches | None = None,
    ) -> None:
        if on_stop not in ON_STOP:
            raise ValueError(f"on_stop must be one of {', '.join(ON_STOP)}, got {on_stop!r}")
        self.matches = DecayedMatches(range(1, num_layers), omega) if shared is None else shared
        self.needs = Needs(confidence=True, shadow_layers=self.matches.layers, prompt_rows=PROMPT_ROWS)
        self._learns = shared is None
        self._drops = on_stop == "drop"

    def stop_before_draw(self, row: DraftRow) -> bool:
        """With "drop", when confidence < tau."""
        return self._drops and self._below(row)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """With "keep", when confidence < tau."""
        return not self._drops and self._below(row)

    def threshold(self, exit_layer: int) -> float:
        """The current tau of a layer, in [0, 1]."""
        return self.matches.threshold(exit_layer)

    def _below(self, row: DraftRow) -> bool:
        assert row.confidence is not None
        return row.confidence < self.threshold(row.exit_layer)

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        """The prompt's last positions are the first round."""
        if self._learns:
            self.matches.observe(shadow)

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round's shadow tokens."""
        if self._learns and record.shadow is not None:
            self.matches.observe(record.shadow)

    def reset(self) -> None:
        """Forget all."""
        if self._learns:
            self.matches.reset()

    def state(self) -> dict[str, Any]:
        """The decayed sums, if they are its own."""
        return self.matches.state() if self._learns else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        if self._learns:
            self.matches.restore(state)
