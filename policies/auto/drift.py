"""Measured costs, corrected by what rounds really take.

A calibration takes a fraction of a second. If the machine is busy just then, its costs can be far off, and unevenly: a draft
step may look dear and a plain step cheap. A policy would then draft nothing, or far too much, for the rest of the process.
Rounds are timed anyway, so their seconds are compared with what the cost predicts for plain rounds, for draft steps and for
verifications. A common factor does not matter, since only ratios of costs decide. Where the three disagree by more than
`TUNING.tolerance`, drafting and verifying are scaled to agree with plain rounds. Each batch size has a comparison of its own:
what sixteen rows take says little about what two take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from policies.auto.constants import TUNING
from policies.cost import CostModel
from policies.records import RoundRecord


def _parts(cost: CostModel, exit_layer: int, drafts: int, early: bool, bits: int | None) -> tuple[float, float]:
    """Costs of a round's draft steps and of its verification.

    early: it stopped before a draw. One more row then went through the first E layers and was looked at, which verification
    need not do again, unless it had fewer bits.
    """
    if bits is not None:
        verifying = cost.rounded_round(exit_layer, drafts, bits) - cost.drafting(exit_layer, drafts, bits)
        return cost.drafting(exit_layer, drafts + early, bits), verifying
    drafting = cost.drafting(exit_layer, drafts)
    verifying = cost.round(exit_layer, drafts) - drafting
    if early:
        drafting = cost.drafting(exit_layer, drafts + 1)
        verifying -= cost.drafting(exit_layer, 1) - cost.head_cost(exit_layer)
    return drafting, verifying


@dataclass(slots=True)
class _Round:
    """What the texts of one round took together, and what the cost predicts."""

    texts: int = 0
    plain: int = 0
    copying: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    drafting: float = 0.0
    verifying: float = 0.0


class CostDrift:
    """Compares rounds with a cost, and says what the cost is now (`cost`).

    cost: for one text's part of the passes that it shares. texts: how many share them. repair: False leaves the cost alone.
    Deterministic: the same records give the same costs. Records without seconds (of a replay) change nothing.
    """

    def __init__(self, cost: CostModel, texts: int = 1, *, repair: bool = True) -> None:
        self._measured = cost
        self._texts, self._repair = texts, repair
        alone = texts == 1
        self._tolerance = TUNING.tolerance if alone else TUNING.tolerance_in_batch
        self._every = TUNING.compare_every if alone else TUNING.compare_every_in_batch
        self._current = _Round()
        self._plain = cost.autoregressive()
        # For drafting and verifying, by the kind of round: exit layer, drafts, whether it stopped before a draw, bits.
        self._predicted: dict[tuple[int, int, bool, int | None], tuple[float, float]] = {}
        self.cost: CostModel = cost
        self._factors = (1.0, 1.0)
        self._round = 0
        self._compared: int | None = None  # the round after which all kinds were last compared
        self._ratios: Mapping[str, deque[tuple[int, float]]] = {"plain": deque(), "draft": deque(), "verify": deque()}

    def observe(self, record: RoundRecord) -> bool:
        """Take a text's round into account; a batch's records come one by one. Returns True if the cost has changed."""
        if not self._repair or record.batch_size != self._texts or record.draft_seconds + record.verify_seconds <= 0:
            return False
        current = self._current
        current.texts += 1
        current.draft_seconds += record.draft_seconds
        current.verify_seconds += record.verify_seconds
        if record.num_copied:
            current.copying += 1
        elif record.exit_layer is None:
            current.plain += 1
        else:
            early = record.stop_cause == "before_draw"
            kind = record.exit_layer, record.num_drafted, early, record.bits
            if kind not in self._predicted:
                self._predicted[kind] = _parts(self._measured, *kind)
            drafting, verifying = self._predicted[kind]
            current.drafting += drafting
            current.verifying += verifying
        if current.texts < self._texts:
            return False
        self._current = _Round()
        return self._complete(current)

    def forget_unfinished(self) -> None:
        """Forget a round in which some text failed, so that its record never came: the batch has changed."""
        self._current = _Round()

    def _complete(self, done: _Round) -> bool:
        """Take a round of all texts. They share its seconds evenly, so one in which they do different things says nothing."""
        self._round += 1
        if done.plain == self._texts:
            self._add("plain", done.draft_seconds + done.verify_seconds, self._texts * self._plain)
        elif done.plain == done.copying == 0:
            self._add("draft", done.draft_seconds, done.drafting)
            self._add("verify", done.verify_seconds, done.verifying)
        for ratios in self._ratios.values():
            while ratios and ratios[0][0] <= self._round - TUNING.window:
                ratios.popleft()
        return self._compare()

    def _add(self, kind: str, seconds: float, predicted: float) -> None:
        if seconds > 0 and predicted > 0:
            self._ratios[kind].append((self._round, seconds / predicted))

    @property
    def due(self) -> str | None:
        """ "plain" or "draft" if the next round should be one, so that kinds can be compared; else None."""
        if not self._repair or (self._compared is not None and self._round - self._compared < self._every):
            return None
        for kind in ("plain", "draft"):
            ratios = self._ratios[kind]
            last = ratios[-1][0] if ratios else 0
            if len(ratios) < TUNING.fewest and self._round - last >= TUNING.probe_every:
                return kind
        return None

    def _compare(self) -> bool:
        # Once per window: for another cost the policy solves its equations again, which takes as long as some rounds.
        waits = self._compared is not None and self._round - self._compared < TUNING.window
        if waits or min(map(len, self._ratios.values())) < TUNING.fewest:
            return False
        self._compared = self._round
        plain, drafting, verifying = (median(ratio for _, ratio in ratios) for ratios in self._ratios.values())
        wanted = (drafting / plain, verifying / plain)
        if all(abs(math.log(new / old)) < math.log(self._tolerance) for new, old in zip(wanted, self._factors)):
            return False
        self._factors = wanted
        self.cost = replace(self._measured, draft_factor=wanted[0], verify_factor=wanted[1])
        return True
