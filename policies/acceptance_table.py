"""How often a token of a given confidence is accepted: SPIDE's table, one per exit layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from policies.records import RoundRecord, ShadowTokens

# Nine bins of width 0.1 up to 0.9, ten of width 0.01 up to 1.0, and {1.0}.
EDGES: tuple[float, ...] = tuple([i / 10 for i in range(1, 10)] + [i / 100 for i in range(91, 101)])
NUM_BINS = len(EDGES) + 1
MIDPOINTS: tuple[float, ...] = tuple([(low + high) / 2 for low, high in zip((0.0, *EDGES[:-1]), EDGES)] + [1.0])
PRIOR_COUNT = 2.0


def confidence_bin(confidence: float) -> int:
    """The bin of a confidence in [0, 1]: 0 for [0, .1) .. 8 for [.8, .9), 9 for [.9, .91) .. 18 for [.99, 1), 19 for 1.

    Source: SPIDE (2025), section 3.2.
    """
    return bisect_right(EDGES, confidence)


class AcceptanceTable:
    """Acceptance per confidence bin for each of several exit layers, from what has been seen and a prior.

    layers: the exit layers it has a row for. decay: what an observation's weight is multiplied by with each later
    observation round; 1 keeps all. prior_count: how many observations the prior is worth in each bin.
    The prior of a bin is a Beta distribution whose mean is the bin's midpoint: calibrated confidence, until seen otherwise.
    """

    def __init__(self, layers: Iterable[int], *, prior_count: float = PRIOR_COUNT, decay: float = 1.0) -> None:
        if prior_count <= 0:
            raise ValueError(f"prior_count must be above 0, got {prior_count}")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        self.layers = tuple(layers)
        self._prior_count = prior_count
        self._decay = decay
        self.reset()

    def reset(self) -> None:
        """Forget everything but the prior."""
        self.accepted: dict[int, list[float]] = {layer: [0.0] * NUM_BINS for layer in self.layers}
        self.seen: dict[int, list[float]] = {layer: [0.0] * NUM_BINS for layer in self.layers}

    def rate(self, layer: int, confidence: float) -> float:
        """Estimated chance that a token drafted at `layer` with this confidence is accepted, in (0, 1]."""
        index = confidence_bin(confidence)
        prior = self._prior_count
        return (self.accepted[layer][index] + prior * MIDPOINTS[index]) / (self.seen[layer][index] + prior)

    def add(self, layer: int, confidence: float, acceptance: float) -> None:
        """One observation: acceptance is 0 or 1, or a probability when sampling."""
        index = confidence_bin(confidence)
        self.accepted[layer][index] += acceptance
        self.seen[layer][index] += 1.0

    def fade(self) -> None:
        """Let everything seen so far count `decay` times as much."""
        if self._decay < 1:
            self.scale(self._decay)

    def scale(self, factor: float) -> None:
        """Let everything seen so far count `factor` times as much."""
        for counts in (self.accepted, self.seen):
            for row in counts.values():
                row[:] = [value * factor for value in row]

    @property
    def observations(self) -> float:
        """What was seen and still counts, of all layers together."""
        return sum(map(sum, self.seen.values()))

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round: its drafts, the row it stopped before, and the shadow tokens of all layers if it has them.

        Only drafts with a known fate count: the accepted ones and the first rejected one.
        """
        self.fade()
        own = record.exit_layer
        if own is not None and own in self.seen and record.confidences is not None:
            for confidence, acceptance in zip(record.confidences, draft_acceptance(record)):
                self.add(own, confidence, acceptance)
            if record.dropped_acceptance is not None and record.shadow is None:  # else it is among the shadow tokens
                self.add(own, record.confidences[-1], record.dropped_acceptance)
        if record.shadow is not None:
            self.observe_shadow(record.shadow, drafted=own, num_drafted=record.num_drafted)

    def observe_shadow(self, shadow: ShadowTokens, *, drafted: int | None = None, num_drafted: int = 0) -> None:
        """Learn from shadow tokens. The first `num_drafted` rows of layer `drafted` are left out: known as drafts."""
        acceptance = shadow_acceptance(shadow)
        confidences = shadow.confidences.tolist()
        for layer, layer_confidences, layer_acceptance in zip(shadow.layers, confidences, acceptance):
            if layer not in self.seen:
                continue
            first = num_drafted if layer == drafted else 0
            for confidence, value in zip(layer_confidences[first:], layer_acceptance[first:]):
                self.add(layer, confidence, value)

    def state(self) -> dict[str, Any]:
        """Counts per layer and bin, for JSON."""
        return {
            "accepted": {str(layer): list(row) for layer, row in self.accepted.items()},
            "seen": {str(layer): list(row) for layer, row in self.seen.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up counts that `state` gave. Raises ValueError if they are for other layers or bins."""
        for name in ("accepted", "seen"):
            rows = {int(layer): [float(value) for value in row] for layer, row in state[name].items()}
            if set(rows) != set(self.layers) or any(len(row) != NUM_BINS for row in rows.values()):
                raise ValueError(
                    f"the saved table is for exit layers {sorted(rows)}, this one for {list(self.layers)};"
                    f" each has {NUM_BINS} bins"
                )
            setattr(self, name, rows)


def draft_acceptance(record: RoundRecord) -> list[float]:
    """Acceptance of each draft whose fate is known: 1 .. 1, and 0 for a rejected one; min(1, p/q) of each when sampling."""
    known = min(record.num_accepted + 1, record.num_drafted)
    if record.acceptance_probabilities is not None:
        return list(record.acceptance_probabilities[:known])
    return [1.0 if index < record.num_accepted else 0.0 for index in range(known)]


def shadow_acceptance(shadow: ShadowTokens) -> list[list[float]]:
    """Acceptance of each shadow token, [layers][rows]: whether it is the target's choice; p(shadow token) when sampling."""
    if shadow.target_probabilities is not None:
        return shadow.target_probabilities.tolist()
    return (shadow.tokens == shadow.target_tokens).float().tolist()
