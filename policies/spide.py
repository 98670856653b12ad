"""SPIDE's serial drafting: go on while the product of the drafts' estimated acceptance stays above tau."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from policies.acceptance_table import PRIOR_COUNT, AcceptanceTable
from policies.base import NeverStop, check_layers
from policies.records import DraftRow, Needs, Plan, RoundRecord

TAU = 0.7
MAX_LENGTH = 18


class SpideStopping(NeverStop):
    """Stop, keeping the token, when the reliability Gamma = product of table rates over the draft falls to tau or below.

    layers: exit layers to keep tables for; all of them learn from the shadow tokens of one row in learn_every, the drafting
    one from its drafts in every round. shadow: False learns from drafts alone. tau in (0, 1); the paper uses 0.5 to 0.9.
    Deviations (docs/policies.md): one table per exit layer; a stated prior; confidence is the top-1 probability.
    Raises ValueError for a tau outside (0, 1).
    Source: SPIDE (2025), section 3.2 and Figure 4.
    """

    def __init__(
        self,
        layers: Iterable[int],
        *,
        num_layers: int,
        tau: float = TAU,
        max_length: int = MAX_LENGTH,
        prior_count: float = PRIOR_COUNT,
        learn_every: int = 1,
        shadow: bool = True,
    ) -> None:
        if not 0 < tau < 1:
            raise ValueError(f"tau must be in (0, 1), got {tau}")
        candidates = check_layers(tuple(layers), num_layers)
        self.table = AcceptanceTable(candidates, prior_count=prior_count)
        self.needs = Needs(confidence=True, shadow_layers=candidates if shadow else (), learn_every=learn_every)
        self.tau = tau
        self._shadow = shadow
        self.reliability = 1.0
        self.max_length = max_length

    def start_round(self, plan: Plan) -> None:
        """Gamma starts at 1."""
        self.reliability = 1.0

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """Multiply Gamma by the row's rate; stop at tau or below."""
        assert row.confidence is not None
        self.reliability *= self.table.rate(row.exit_layer, row.confidence)
        return self.reliability <= self.tau or row.num_drafted + 1 >= self.max_length

    def threshold(self, exit_layer: int) -> float:
        """tau."""
        return self.tau

    def observe(self, record: RoundRecord) -> None:
        """Update the tables."""
        self.table.observe(record if self._shadow else replace(record, shadow=None))

    def reset(self) -> None:
        """Back to the prior."""
        self.table.reset()

    def state(self) -> dict[str, Any]:
        """The tables."""
        return self.table.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Take up tables that `state` gave."""
        self.table.restore(state)
