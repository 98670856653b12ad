"""SPIDE: how often a token of a given confidence is accepted, and drafting on while the product of that stays above tau."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from policies.base import NeverStop
from policies.bounds import MAX_DRAFTS, check_draft_layer, check_number
from policies.building import Setup
from policies.records import Drafter, DraftRow, ObservationSpec, Plan, RoundRecord, Shadow

TAU = 0.7
MAX_LENGTH = 18
PRIOR_COUNT = 2.0
"""Observations that the prior is worth in each bin."""

_TENTHS = tuple(i / 10 for i in range(10))
_HUNDREDTHS = tuple(i / 100 for i in range(90, 101))
_DOUBTS = (0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0003, 0.0001)
EDGES = (*_TENTHS[1:], *(1 - doubt for doubt in _DOUBTS))
"""Ascending edges of twenty bins of confidence, those of `auto`; a bin holds its lower edge.

In the paper's bfloat16 everything above 0.998 is 1.0; in float32 almost nothing is. So these above 0.9 are bins of
1 - confidence that shrink down to 0.0001. A float32 confidence gives 1 - confidence there to within 2 % (measured), far less
than the width of a bin."""
MIDPOINTS = (
    *((low + high) / 2 for low, high in pairwise(_TENTHS)),
    *(1 - (low * high) ** 0.5 for low, high in pairwise((0.1, *_DOUBTS))),
    1 - _DOUBTS[-1] / 2,
)
"""The acceptance that each bin starts from: calibrated confidence."""
NUM_BINS = len(MIDPOINTS)
BINS = {
    "paper": (
        (*_TENTHS[1:], *_HUNDREDTHS[1:]),
        (*MIDPOINTS[:9], *((low + high) / 2 for low, high in pairwise(_HUNDREDTHS)), 1.0),
    ),
    "fine": (EDGES, MIDPOINTS),
}
"""Edges and midpoints by name. The paper's have a width of 0.1 up to 0.9, of 0.01 up to 1.0, and one for {1.0}."""


def bin_of(confidence: float, edges: Sequence[float] = EDGES) -> int:
    """Find the bin of a confidence in [0, 1]."""
    return bisect_right(edges, confidence)


class AcceptanceTable:
    """Acceptance per confidence bin for each of several drafters, from what has been seen and a prior.

    The prior of a bin is a Beta distribution whose mean is the bin's midpoint: calibrated confidence, until seen otherwise.
    """

    def __init__(self, drafters: Iterable[Drafter], bins: str = "paper") -> None:
        if bins not in BINS:
            raise ValueError(f"bins must be one of {', '.join(BINS)}, got {bins!r}")
        self.drafters = tuple(drafters)
        self.edges, self._midpoints = BINS[bins]
        self.reset()

    def reset(self) -> None:
        self.accepted = {drafter: [0.0] * NUM_BINS for drafter in self.drafters}
        self.seen = {drafter: [0.0] * NUM_BINS for drafter in self.drafters}

    def rate(self, drafter: Drafter, confidence: float) -> float:
        """Estimate the chance that a token drafted with this confidence is accepted, in (0, 1]."""
        index = bin_of(confidence, self.edges)
        accepted, seen = self.accepted[drafter][index], self.seen[drafter][index]
        return (accepted + PRIOR_COUNT * self._midpoints[index]) / (seen + PRIOR_COUNT)

    def add(self, drafter: Drafter, confidence: float, acceptance: float) -> None:
        """One observation: acceptance is 0 or 1, or a probability when sampling."""
        index = bin_of(confidence, self.edges)
        self.accepted[drafter][index] += acceptance
        self.seen[drafter][index] += 1.0

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round: its drafts, the row it stopped before, and the shadow tokens of all layers if it has them."""
        own = record.drafter
        if own is not None and own in self.seen:
            for confidence, acceptance in draft_outcomes(record):
                self.add(own, confidence, acceptance)
        if record.shadow is not None:
            self.observe_shadow(record.shadow, own, record.num_drafted)

    def observe_shadow(self, shadow: Shadow, drafted: Drafter | None = None, num_drafted: int = 0) -> None:
        """Learn from shadow tokens, as of `shadow_outcomes`."""
        for drafter, confidence, acceptance in shadow_outcomes(shadow, drafted, num_drafted):
            if drafter in self.seen:
                self.add(drafter, confidence, acceptance)

    def state(self) -> dict[str, Any]:
        """Return counts per drafter and bin, and the bins' edges, for JSON."""
        return {
            "edges": list(self.edges),
            "accepted": {str(drafter.saved_key): list(row) for drafter, row in self.accepted.items()},
            "seen": {str(drafter.saved_key): list(row) for drafter, row in self.seen.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up counts that `state` gave.

        Raises ValueError, and changes nothing, if they are for other drafters or bins, or from another version.
        """
        if missing := sorted({"edges", "accepted", "seen"} - state.keys()):
            raise ValueError(f"the saved table lacks {', '.join(missing)}: it was saved by another version")
        if list(state["edges"]) != list(self.edges):
            raise ValueError("the saved table is for other bins of confidence: start without it")
        tables = [
            {int(key): [float(value) for value in row] for key, row in state[name].items()}
            for name in ("accepted", "seen")
        ]
        keys = [drafter.saved_key for drafter in self.drafters]
        for rows in tables:
            if set(rows) != set(keys) or any(len(row) != NUM_BINS for row in rows.values()):
                raise ValueError(
                    f"the saved table is for exit layers {sorted(rows)}, this one for {keys} with {NUM_BINS} bins each"
                )
        self.accepted, self.seen = ({drafter: rows[drafter.saved_key] for drafter in self.drafters} for rows in tables)


def draft_outcomes(record: RoundRecord) -> list[tuple[float, float]]:
    """Return confidence and acceptance of each draft of known fate, and of the row that the round stopped before.

    Only the accepted drafts and the first rejected one count: 1, or 0 for a rejected one; the row's chance when sampling.
    """
    known = min(record.num_accepted + 1, record.num_drafted)
    outcomes = [1.0 if index < record.num_accepted else 0.0 for index in range(known)]
    if record.acceptance_probabilities is not None:
        outcomes = [*record.acceptance_probabilities[:known]]
    if record.dropped_acceptance is not None and record.shadow is None:  # else it is among the shadow tokens
        outcomes.append(record.dropped_acceptance)
    return list(zip(record.confidences or (), outcomes))


def shadow_outcomes(
    shadow: Shadow, drafted: Drafter | None = None, num_drafted: int = 0
) -> Iterator[tuple[Drafter, float, float]]:
    """Yield drafter, confidence and acceptance of each shadow token.

    The first `num_drafted` rows of `drafted` are left out: they are known as drafts.
    """
    for layer, confidences, acceptance in zip(shadow.layers, *read_shadow(shadow)):
        drafter = Drafter(layer)
        first = num_drafted if drafter == drafted else 0
        for confidence, value in zip(confidences[first:], acceptance[first:]):
            yield drafter, confidence, value


def read_shadow(shadow: Shadow) -> tuple[list[list[float]], list[list[float]]]:
    """Confidence and acceptance of each shadow token, [layers][rows] each, in one copy from a device."""
    confidences, acceptance = shadow.confidences, shadow_acceptance(shadow)
    if confidences.is_cpu:
        return confidences.tolist(), acceptance.tolist()
    found, accepted = torch.stack([confidences, acceptance.to(confidences)]).tolist()
    return found, accepted


def shadow_acceptance(shadow: Shadow) -> Tensor:
    """Return the acceptance of each shadow token, [layers, rows]: 1 if it is the target's; when sampling its chance."""
    if shadow.acceptance_probabilities is not None:
        return shadow.acceptance_probabilities
    return (shadow.tokens == shadow.target_tokens).float()


class SpideStopping(NeverStop):
    """Stop, keeping the token, when the reliability Gamma = product of table rates over the draft falls to tau or below.

    layers: exit layers to keep tables for. The one that drafts learns from its drafts in every round, and where there are
        several all learn from shadow tokens, too. A lone layer's drafts say nearly all that its shadow tokens would.
    bits: of the weights that draft; None for the model's own. tau in (0, 1); the paper uses 0.5 to 0.9. bins: a key of BINS.
    This is the serial half of Algorithm 1. The parallel half, in which the drafter goes on while the target verifies, is a
    simulation (bench/papers/spide_overlap.py), since it needs a second device: on one it is slower than drafts in turn.
    Deviations (docs/policies.md): one table per exit layer; a stated prior.
    Raises ValueError for values out of range.
    Source: SPIDE (2025), section 3.2 and Figure 4.
    """

    def __init__(
        self,
        layers: Iterable[int],
        *,
        num_layers: int,
        bits: int | None = None,
        tau: float = TAU,
        max_length: int = MAX_LENGTH,
        bins: str = "paper",
    ) -> None:
        if not 0 < tau < 1:
            raise ValueError(f"tau must be in (0, 1), got {tau}")
        check_number("max_length", max_length, 1, MAX_DRAFTS)
        candidates = tuple(sorted({check_draft_layer(layer, num_layers, bits) for layer in layers}))
        self._shadow = len(candidates) > 1
        self.table = AcceptanceTable((Drafter(layer, bits) for layer in candidates), bins)
        self.observes = ObservationSpec(confidence=True, shadow_layers=candidates if self._shadow else ())
        self.tau = tau
        self.reliability = 1.0
        self.max_length = max_length

    @classmethod
    def from_args(cls, setup: Setup, **options: Any) -> SpideStopping:
        return cls(setup.layers_to_learn, num_layers=setup.num_layers, bits=setup.drafts_in, **options)

    def start_round(self, plan: Plan) -> None:
        self.reliability = 1.0

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        assert row.confidence is not None
        self.reliability *= self.table.rate(row.drafter, row.confidence)
        return self.reliability <= self.tau or row.num_drafted + 1 >= self.max_length

    def threshold(self, drafter: Drafter) -> float:
        return self.tau

    def observe_prompt(self, shadow: Shadow) -> None:
        """Learn from the prompt's last rows, whoever asked for them."""
        if self._shadow:
            self.table.observe_shadow(shadow)

    def observe(self, record: RoundRecord) -> None:
        self.table.observe(record if self._shadow else replace(record, shadow=None))

    def reset(self) -> None:
        self.table.reset()

    def state(self) -> dict[str, Any]:
        return self.table.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.table.restore(state)
