"""Pacer's blockwise stopping: every b tokens a trained layer says how likely they are to be accepted."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import torch

from policies.base import NeverStop
from policies.bounds import MAX_DRAFTS, check_number
from policies.building import Setup
from policies.records import Drafter, DraftRow, ObservationSpec, Plan, PolicyCost, PreVerifier

BLOCK = 4
THRESHOLD = 0.7
GROWTH = 1.05
MAX_LENGTH = 32


class PacerStopping(NeverStop):
    """Draft in blocks of b tokens; stop, keeping the block, when its mean estimated acceptance is at most t; then t *= rho.

    t is back at its start in every round (our reading of Algorithm 1). max_length: of a draft; a
    block that ends there, or at the plan's cap, is not judged, since nothing would come after it.
    Keeping what was drawn is exact for any rule, so this one is for sampling, too (policies.base).
    Raises ValueError for settings out of range.
    Source: Pacer (Zhang et al. 2025), section 3.2 and Algorithm 1.
    """

    exit_layers: tuple[int, ...]

    def __init__(
        self,
        preverifier: PreVerifier,
        *,
        b: int = BLOCK,
        t: float = THRESHOLD,
        rho: float = GROWTH,
        max_length: int = MAX_LENGTH,
    ) -> None:
        check_number("b", b, 1, MAX_DRAFTS)
        check_number("max_length", max_length, 1, MAX_DRAFTS)
        if not 0 < t < 1:
            raise ValueError(f"t must be in (0, 1), got {t}")
        if not 0 < rho < math.inf:
            raise ValueError(f"rho must be a number above 0, got {rho}")
        self.preverifier = preverifier
        self.exit_layers = preverifier.exit_layers
        self.b, self.t, self.rho = b, t, rho
        self.max_length = max_length
        self.observes = ObservationSpec(exit_hidden=True, features=True, context_layers=self.exit_layers)
        self._current = t
        self._cap = max_length
        self._block: list[DraftRow] = []
        self._spent = PolicyCost()

    @classmethod
    def from_args(
        cls, setup: Setup, path: str | None = None, exit_layer: int | None = None, **options: Any
    ) -> PacerStopping:
        """Built from its name's ARGS (`policies.names`), with what was found best when its pre-verifier was trained."""
        if setup.preverifier is None:
            raise ValueError("'pacer' needs a pre-verifier: pass `preverifier`, which loads one for the model")
        loaded = setup.preverifier(path)
        own = {name: value for name, value in loaded.defaults.items() if name in ("b", "t", "rho")}
        return cls(loaded, **{**own, **options})

    def start_round(self, plan: Plan) -> None:
        """No block yet; t at its start. Raises ValueError for an exit layer that it was not trained on."""
        if plan.exit_layer not in self.exit_layers:
            layers = ", ".join(map(str, self.exit_layers))
            raise ValueError(f"this pre-verifier judges exit layers {layers}, the plan's is {plan.exit_layer}")
        self._current = self.t
        self._cap = min(self.max_length, plan.max_speculations)
        self._block = []
        self._spent = PolicyCost()

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """At the end of a block: when its estimates are too low. At the cap always."""
        self._block.append(row)
        if row.num_drafted + 1 >= self._cap:
            return True
        if len(self._block) < self.b:
            return False
        stops = self._score(self._block) <= self._current
        self._current *= self.rho
        self._block = []
        return stops

    def _score(self, block: list[DraftRow]) -> float:
        """Compute what is compared with t. One pass of the pre-verifier, with one wait for the device."""
        started = perf_counter()
        first = block[0]
        assert first.context is not None
        estimates = self.preverifier.estimate(
            first.context,
            first.exit_layer,
            first.position,
            first.num_drafted + 1,
            torch.stack([row.exit_hidden for row in block if row.exit_hidden is not None]),
            torch.stack([row.features for row in block if row.features is not None]),
        )
        self._spent = self._spent + PolicyCost(layers=1, seconds=perf_counter() - started)
        return sum(estimates) / len(estimates)

    def threshold(self, drafter: Drafter) -> float:
        """t, for the next block."""
        return self._current

    def spent(self) -> PolicyCost:
        """Return the pre-verifier's passes in this round, each a layer, and their time."""
        return self._spent
