"""What rounds cost: as expected, and corrected by the seconds that they take.

An expected cost may be far off: it was computed, or measured on a busy machine. Rounds are timed anyway, so their seconds are
compared with it, by kind: plain steps, verifications by their rows, draft steps by their bits. Only ratios decide, so a
correction is relative to plain steps, and the median of the last ones counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_high

import numpy as np

from policies.cost import CostModel, MeasuredCost, at_rows, parts_of
from policies.fixed import MAX_COPY_LENGTH
from policies.records import Drafter, RoundRecord

KEPT = 12
"""Rounds of a kind that are remembered."""
ENOUGH = 3
"""Rounds of a kind that must be timed before they correct the cost; until then the kind is tried every few rounds."""
TRY_EVERY, TRY_AGAIN = 4, 128
"""Rounds from one try of a kind to the next: at first, and later, since neither texts nor machines stay as they are."""
TOLERANCE = 1.1
"""Corrections that differ by less change nothing."""
MOST = 1.5
"""Plain steps that a row or a draft may take: what took longer was interrupted, and says nothing."""
_PLAIN = 1  # kinds are rows of verifications, and of drafts their bits, below 0
_ROWS = (_PLAIN, 2, 3, 4, 5, 6, 8, 11, 16, 24)
"""Rows of a verification, or more, that are a kind of their own."""
_ROWS_KEPT = 16  # numbers of rows of which `learned` tells the seconds
_USUAL = 4
"""Drafts for which an exit's price in full and in fewer bits is compared."""


def _drafts_in(bits: int | None) -> int:
    return -(bits or 16)


class RoundCosts:
    """The costs of each of `drafters` with up to `most` drafts, for one of `texts` texts that share the passes.

    plain: of a plain step. copying: by tokens copied. rounds: by drafter and drafts, [drafters, most + 1]; looks: of norm and
    head for one row more, [drafters]; steps: of the j-th draft without its look, [drafters, most]. bits: that each drafter
    drafts in: those of `made` where they make an exit cheaper. repair: whether to correct them. Deterministic: the same
    records give the same costs.
    """

    def __init__(
        self, cost: CostModel, drafters: Sequence[Drafter], made: Sequence[int], most: int, texts: int, *, repair: bool
    ) -> None:
        self.cost = cost = cost.for_batch_size(texts)
        self._texts, self._repair = texts, repair
        self.bits = [self._bits_of(drafter, made, min(_USUAL, most)) for drafter in drafters]
        priced = [Drafter(drafter.exit_layer, bits) for drafter, bits in zip(drafters, self.bits)]
        counts = range(most + 1)
        parts = np.array([[parts_of(cost, one, count) for count in counts] for one in priced])
        self._drafting, self._verifying = parts[..., 0], parts[..., 1]
        looks = [cost.head_cost(e) if bits is None else cost.drafting(e, 1, bits) for e, bits in priced]
        self._looks = np.array(looks)
        self._copying = [cost.copying(copied) for copied in range(MAX_COPY_LENGTH + 1)]
        self.plain = cost.autoregressive()
        self._ratios: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._round = self._rows = self._texts_done = 0
        self._took = [0.0] * 4  # of the round at hand: seconds and costs, of drafting and of verifying
        self._expected: dict[tuple[Drafter | None, int, bool], tuple[float, float]] = {}
        self._factors: dict[int, float] = {}
        self._is_news = False
        self._make_tables()

    def _bits_of(self, drafter: Drafter, made: Sequence[int], usual: int) -> int | None:
        layer, bits = drafter
        if bits is not None:
            return bits
        prices = [(self.cost.round(layer, usual, number), number) for number in made]
        price, best = min(prices, default=(np.inf, None))
        return best if price < self.cost.round(layer, usual) else None

    def _make_tables(self) -> None:
        longest = max(len(self._copying), self._drafting.shape[1])
        rows = np.array([self._factor_of(count + 1) for count in range(longest)])
        steps = np.array([self._factors.get(_drafts_in(bits), 1.0) for bits in self.bits])[:, None]
        # Noise must not make more rows cheaper than fewer: drafts would seem to cost nothing.
        verifying = np.maximum.accumulate(rows[: self._drafting.shape[1]] * self._verifying, axis=1)
        self.rounds = steps * self._drafting + verifying
        self._round_list: list[list[float]] = self.rounds.tolist()
        self.looks = steps[:, 0] * self._looks
        self.steps = np.diff(self.rounds, axis=1) - self.looks[:, None]
        self.copying: list[float] = np.maximum.accumulate(rows[: len(self._copying)] * self._copying).tolist()

    def _factor_of(self, rows: int) -> float:
        """Return the correction of a verification of so many rows a text, between those of which something is known."""
        known = sorted(key for key in self._factors if key > 0) or [_PLAIN]
        return float(np.interp(rows, known, [self._factors.get(key, 1.0) for key in known]))

    def observe(self, record: RoundRecord) -> bool:
        """Take a text's round into account; a batch's records come one by one. Returns whether costs have changed."""
        if not self._repair or record.batch_size != self._texts or record.verify_seconds <= 0:
            return False
        kind = record.drafter, record.num_drafted, record.stop_cause == "before_draw"
        if kind not in self._expected:
            self._expected[kind] = parts_of(self.cost, *kind)
        drafting, verifying = self._expected[kind]
        self._took[0 if drafting else 1] += record.draft_seconds  # of copies that is planning
        self._took[1] += record.verify_seconds + record.accept_seconds
        self._took[2] += drafting
        self._took[3] += verifying
        self._rows += record.num_drafted + 1
        self._texts_done += 1
        if self._texts_done < self._texts:
            return False
        # The texts of a batch share a round's seconds evenly, whatever each did.
        self._round += 1
        draft_seconds, verify_seconds, drafting, verifying = self._took
        rows = self._rows / self._texts
        self._add(_ROWS[bisect_right(_ROWS, rows) - 1], verify_seconds, verifying, rows)
        if drafting > 0:
            self._add(_drafts_in(record.bits), draft_seconds, drafting, rows)
        self.forget_unfinished()
        looks_now = self._round % 32 == 0 or self._round & (self._round - 1) == 0
        return looks_now and self._correct()

    def forget_unfinished(self) -> None:
        """Forget a round in which some text failed, so that its record never came."""
        self._took = [0.0] * 4
        self._rows = self._texts_done = 0

    def _add(self, kind: int, seconds: float, expected: float, rows: float) -> None:
        self._last[kind] = self._round
        plain, ratio = self._ratios.get(_PLAIN), seconds / expected
        if kind != _PLAIN:
            # Beside the plain steps of the same time, since a machine is now faster, now slower.
            scale = median_high(plain) if plain else 0.0
            if not scale or seconds > MOST * rows * self._texts * self.plain * scale:
                return
            ratio /= scale
        seen = self._ratios.setdefault(kind, deque(maxlen=KEPT))
        self._is_news |= kind == _PLAIN and len(seen) in (ENOUGH - 1, KEPT - 1)
        seen.append(ratio)

    def _correct(self) -> bool:
        found = {kind: median_high(seen) for kind, seen in self._ratios.items() if len(seen) >= ENOUGH}
        if _PLAIN not in found:
            return False
        factors = {**found, _PLAIN: 1.0}
        known = [self._factors.get(kind, 1.0) / factor for kind, factor in factors.items()]
        if all(1 / TOLERANCE < change < TOLERANCE for change in known):
            return False
        self._factors, self._is_news = factors, True
        self._make_tables()
        return True

    def of(self, drafter: int | None, drafts: int) -> float:
        """Price a round of these drafts, of copies if no drafter made them."""
        return self.copying[drafts] if drafter is None else self._round_list[drafter][drafts]

    def is_due(self, drafter: int | None = None) -> bool:
        """Return whether to try drafts by this drafter, or a plain step, to compare what they cost."""
        kind = _PLAIN if drafter is None else _drafts_in(self.bits[drafter])
        every = TRY_EVERY if len(self._ratios.get(kind, ())) < ENOUGH else TRY_AGAIN
        return self._repair and self._round - self._last.get(kind, -TRY_EVERY) >= every

    def learned(self) -> MeasuredCost | None:
        """Return what rounds of a text alone have shown, in seconds; None if that is no news since the last time."""
        plain, numbers = self._ratios.get(_PLAIN, ()), range(1, _ROWS_KEPT + 1)
        if not isinstance(self.cost, MeasuredCost) or not self._is_news or self._texts > 1 or len(plain) < ENOUGH:
            return None
        scale = median_high(plain)
        self._is_news = False

        def corrected(cost: CostModel, factors: Sequence[float]) -> CostModel:
            return replace(
                cost,
                layer_seconds=tuple(factor * at_rows(cost.layer_seconds, n) for n, factor in zip(numbers, factors)),
                head_seconds=tuple(factor * at_rows(cost.head_seconds, n) for n, factor in zip(numbers, factors)),
                draft_seconds=factors[0] * cost.draft_seconds,
            )

        drafting = {bits: scale * self._factors.get(_drafts_in(bits), 1.0) for bits in (None, *dict(self.cost.rounded))}
        rounded = ((bits, corrected(cost, [drafting[bits]] * _ROWS_KEPT)) for bits, cost in self.cost.rounded)
        found = corrected(self.cost, [scale * self._factor_of(n) for n in numbers])
        # What drafts at exits take more than expected goes to each draft's own seconds: right at a quarter of the depth.
        more = (drafting[None] - scale) * self.cost.drafting(max(self.cost.num_layers // 4, 1), 1)
        found = replace(found, draft_seconds=found.draft_seconds + more, rounded=tuple(rounded))
        assert isinstance(found, MeasuredCost)
        return found
