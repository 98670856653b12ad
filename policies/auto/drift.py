"""Measured costs, repaired by what rounds really take.

A calibration takes a fraction of a second. Was the machine busy just then, its costs can be wrong by far, and unevenly: a
draft step may look dear and a plain step cheap. Then a policy drafts nothing, or far too much, for the rest of the process.
Rounds are timed anyway, so their seconds are compared with what the cost predicts: of plain rounds, of draft steps and of
verifications. A common factor does not matter, since only ratios of costs decide; where the three disagree by more than
`TUNING.tolerance`, drafting and verifying are scaled to agree with plain rounds. Each batch size has a
comparison of its own: what sixteen rows take says little about what two take.
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


def _parts(cost: CostModel, exit_layer: int, drafts: int, early: bool) -> tuple[float, float]:
    """Of a round: its draft steps, and its verification. early: it stopped before a draw, so that one more row went through
    the first E layers and was looked at, which verification then need not do."""
    drafting = cost.drafting(exit_layer, drafts)
    verifying = cost.round(exit_layer, drafts) - drafting
    if early:
        drafting = cost.drafting(exit_layer, drafts + 1)
        verifying -= cost.drafting(exit_layer, 1) - cost.look(exit_layer)
    return drafting, verifying


@dataclass(slots=True)
class _Round:
    """What the texts of one round took together, and what they should have taken."""

    texts: int = 0
    plain: int = 0
    copying: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    drafting: float = 0.0
    verifying: float = 0.0


class CostDrift:
    """Compares rounds with a cost, and says what the cost is now.

    cost: of one text, for its part of the passes that it shares with others. texts: how many share them.
    Deterministic: the same records give the same costs. Records without seconds (of a replay) change nothing.
    """

    def __init__(self, cost: CostModel, texts: int = 1) -> None:
        self._measured = cost
        self._texts = texts
        alone = texts == 1
        self._tolerance = TUNING.tolerance if alone else TUNING.tolerance_in_batch
        self._every = TUNING.compare_every if alone else TUNING.compare_every_in_batch
        self._current = _Round()
        self._plain = cost.autoregressive()
        # Of drafting and verifying, by kind of round: exit layer, drafts, whether it stopped before a draw.
        self._predicted: dict[tuple[int, int, bool], tuple[float, float]] = {}
        self.cost: CostModel = cost
        self._factors = (1.0, 1.0)
        self._round = 0
        self._compared: int | None = None  # the round after which all kinds were last compared
        self._ratios: Mapping[str, deque[tuple[int, float]]] = {"plain": deque(), "draft": deque(), "verify": deque()}

    def observe(self, record: RoundRecord) -> bool:
        """Take a text's round into account; in company those of all texts come in turn. Returns whether the cost changed."""
        if record.batch_size != self._texts or record.draft_seconds + record.verify_seconds <= 0:
            return False
        current = self._current
        current.texts += 1
        current.draft_seconds += record.draft_seconds
        current.verify_seconds += record.verify_seconds
        if record.num_tried:
            current.copying += 1
        elif record.exit_layer is None:
            current.plain += 1
        else:
            early = record.stop_cause == "before_draw"
            kind = record.exit_layer, record.num_drafted, early
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
        """The company has changed: a round of which some text's record never came (it failed) is none."""
        self._current = _Round()

    def _complete(self, done: _Round) -> bool:
        """Of all texts. Seconds are shared out evenly, so a round in which texts do different things tells nothing."""
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
        if self._compared is not None and self._round - self._compared < self._every:
            return None
        for kind in ("plain", "draft"):
            ratios = self._ratios[kind]
            last = ratios[-1][0] if ratios else 0
            if len(ratios) < TUNING.fewest and self._round - last >= TUNING.probe_every:
                return kind
        return None

    def _compare(self) -> bool:
        # Once per window: with another cost a policy solves its equations anew, which takes as long as some rounds.
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
