"""How often a token of a given confidence is accepted: SPIDE's table, one per drafter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from policies.records import Drafter, RoundRecord, Shadow

PRIOR_COUNT = 2.0


@dataclass(frozen=True, slots=True)
class Bins:
    """Intervals of confidence, and the acceptance that each starts from.

    edges: ascending, in (0, 1]; bin i holds [edges[i - 1], edges[i]), the first from 0, the last up to 1 inclusive.
    midpoints: one more than edges.
    """

    edges: tuple[float, ...]
    midpoints: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.midpoints)

    def index(self, confidence: float) -> int:
        """Find the bin of a confidence in [0, 1]."""
        return bisect_right(self.edges, confidence)


def _doubt_bins(doubts: tuple[float, ...]) -> Bins:
    """Nine bins of width 0.1 up to 0.9, then bins whose edges are given as 1 - confidence, descending from 0.1."""
    low = tuple(i / 10 for i in range(10))
    upper = zip((0.1, *doubts), doubts)
    midpoints = [(a + b) / 2 for a, b in pairwise(low)] + [1 - (a * b) ** 0.5 for a, b in upper]
    return Bins((*low[1:], *(1 - doubt for doubt in doubts)), (*midpoints, 1 - doubts[-1] / 2))


PAPER_BINS = Bins(
    tuple([i / 10 for i in range(1, 10)] + [i / 100 for i in range(91, 101)]),
    tuple([(2 * i + 1) / 20 for i in range(9)] + [(2 * i + 1) / 200 for i in range(90, 100)] + [1.0]),
)
"""SPIDE's twenty (section 3.2): nine of width 0.1 up to 0.9, ten of width 0.01 up to 1.0, and {1.0}.

In the paper's bfloat16 everything above 0.998 is 1.0. In float32 almost nothing is, so the last bin stays empty there."""
DOUBT_BINS = _doubt_bins((0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0003, 0.0001))
"""Ours: also twenty. Above 0.9 they are bins of 1 - confidence that shrink down to 0.0001.

A float32 confidence gives 1 - confidence there to within 2 % (measured), far less than the width of a bin."""
BINS = {"doubt": DOUBT_BINS, "paper": PAPER_BINS}


class AcceptanceTable:
    """Acceptance per confidence bin for each of several drafters, from what has been seen and a prior.

    bins: of confidence. decay: what an observation's weight is multiplied by with each later observation round; 1 keeps all.
    prior_count: how many observations the prior is worth in each bin.
    The prior of a bin is a Beta distribution whose mean is the bin's midpoint: calibrated confidence, until seen otherwise.
    """

    def __init__(
        self,
        drafters: Iterable[Drafter],
        *,
        bins: Bins = DOUBT_BINS,
        prior_count: float = PRIOR_COUNT,
        decay: float = 1.0,
    ) -> None:
        if prior_count <= 0:
            raise ValueError(f"prior_count must be above 0, got {prior_count}")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        self.drafters = tuple(drafters)
        self.bins = bins
        self._prior_count = prior_count
        self._decay = decay
        self.reset()

    def reset(self) -> None:
        self.accepted: dict[Drafter, list[float]] = {drafter: [0.0] * len(self.bins) for drafter in self.drafters}
        self.seen: dict[Drafter, list[float]] = {drafter: [0.0] * len(self.bins) for drafter in self.drafters}

    def rate(self, drafter: Drafter, confidence: float) -> float:
        """Estimate the chance that a token drafted with this confidence is accepted, in (0, 1]."""
        index = self.bins.index(confidence)
        prior = self._prior_count
        return (self.accepted[drafter][index] + prior * self.bins.midpoints[index]) / (
            self.seen[drafter][index] + prior
        )

    def add(self, drafter: Drafter, confidence: float, acceptance: float) -> None:
        """One observation: acceptance is 0 or 1, or a probability when sampling."""
        index = self.bins.index(confidence)
        self.accepted[drafter][index] += acceptance
        self.seen[drafter][index] += 1.0

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
        """Return the number of observations that still count, over all drafters."""
        return sum(map(sum, self.seen.values()))

    def observe(self, record: RoundRecord) -> list[list[float]] | None:
        """Learn from a round: its drafts, the row it stopped before, and the shadow tokens of all layers if it has them.

        Only drafts with a known fate count: the accepted ones and the first rejected one. Returns what `observe_shadow` does.
        """
        self.fade()
        own = record.drafter
        if own is not None and own in self.seen and record.confidences is not None:
            for confidence, acceptance in zip(record.confidences, draft_acceptance(record)):
                self.add(own, confidence, acceptance)
            if record.dropped_acceptance is not None and record.shadow is None:  # else it is among the shadow tokens
                self.add(own, record.confidences[-1], record.dropped_acceptance)
        if record.shadow is not None:
            return self.observe_shadow(record.shadow, drafted=own, num_drafted=record.num_drafted)
        return None

    def observe_shadow(
        self, shadow: Shadow, *, drafted: Drafter | None = None, num_drafted: int = 0
    ) -> list[list[float]]:
        """Learn from shadow tokens. The first `num_drafted` rows of `drafted` are left out: known as drafts.

        Returns their confidences, [layers][rows], so that nobody has to read them once more.
        """
        confidences, acceptance = read_shadow(shadow)
        for layer, layer_confidences, layer_acceptance in zip(shadow.layers, confidences, acceptance):
            drafter = Drafter(layer)
            if drafter not in self.seen:
                continue
            first = num_drafted if drafter == drafted else 0
            for confidence, value in zip(layer_confidences[first:], layer_acceptance[first:]):
                self.add(drafter, confidence, value)
        return confidences

    def state(self) -> dict[str, Any]:
        """Return counts per drafter and bin, and the bins' edges, for JSON."""
        return {
            "edges": list(self.bins.edges),
            "accepted": {str(drafter.saved_key): list(row) for drafter, row in self.accepted.items()},
            "seen": {str(drafter.saved_key): list(row) for drafter, row in self.seen.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up counts that `state` gave.

        Raises ValueError, and changes nothing, if they are for other drafters or bins, or from another version.
        """
        if missing := sorted({"edges", "accepted", "seen"} - state.keys()):
            raise ValueError(f"the saved table lacks {', '.join(missing)}: it was saved by another version")
        if list(state["edges"]) != list(self.bins.edges):
            raise ValueError("the saved table is for other bins of confidence")
        tables = [
            {int(key): [float(value) for value in row] for key, row in state[name].items()}
            for name in ("accepted", "seen")
        ]
        keys = [drafter.saved_key for drafter in self.drafters]
        for rows in tables:
            if set(rows) != set(keys) or any(len(row) != len(self.bins) for row in rows.values()):
                raise ValueError(
                    f"the saved table is for exit layers {sorted(rows)}, this one for {keys}"
                    f" with {len(self.bins)} bins each"
                )
        self.accepted, self.seen = ({drafter: rows[drafter.saved_key] for drafter in self.drafters} for rows in tables)


def draft_acceptance(record: RoundRecord) -> list[float]:
    """Return the acceptance of each draft of known fate: 1, or 0 for a rejected one; min(1, p/q) when sampling."""
    known = min(record.num_accepted + 1, record.num_drafted)
    if record.acceptance_probabilities is not None:
        return list(record.acceptance_probabilities[:known])
    return [1.0 if index < record.num_accepted else 0.0 for index in range(known)]


def shadow_acceptance(shadow: Shadow) -> list[list[float]]:
    """Return the acceptance of each shadow token, [layers][rows].

    Whether it is the target's choice; p(shadow token) when sampling.
    """
    return _acceptance(shadow).tolist()


def read_shadow(shadow: Shadow) -> tuple[list[list[float]], list[list[float]]]:
    """Confidence and acceptance of each shadow token, [layers][rows] each, in one copy from a device."""
    confidences, acceptance = shadow.confidences, _acceptance(shadow)
    if confidences.is_cpu:
        return confidences.tolist(), acceptance.tolist()
    found, accepted = torch.stack([confidences, acceptance.to(confidences)]).tolist()
    return found, accepted


def _acceptance(shadow: Shadow) -> Tensor:
    if shadow.target_probabilities is not None:
        return shadow.target_probabilities
    return (shadow.tokens == shadow.target_tokens).float()
