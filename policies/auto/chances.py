"""How often a draft is accepted, by what drafted it and how sure that was.

In every model we looked at, the log odds of acceptance are nearly a line in the log odds of confidence. So a drafter has a
height and a slope, which a few rows of any confidence move, and what was seen in a bin of confidences corrects the line there,
as observations correct the mean of a Beta distribution. All of it fades, since texts change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.records import Drafter
from policies.spide import EDGES, MIDPOINTS, NUM_BINS, bin_of

Array = NDArray[np.float64]

COPIES = Drafter(0)
"""What stands for tokens that are copied from where the text ended like this before."""
PRIOR_HEIGHTS = {None: -1.0, 8: 4.5, 4: 2.0}
"""Of exits (None): those of a model that was not trained to exit early do not pay. Of all layers in 8 and 4 bits: measured on
16 free answers of SmolLM2 (docs/log.md, 24, Z5)."""
SPREAD, SLOPE_SPREAD = 2.0, 0.5
"""Prior standard deviations of a height and of a slope, whose mean is 1: what is usual is soon given up."""
CHANGE = 0.01
"""Variance that each row adds to a height, and ten times what it adds to a slope: a line remembers some thirty rows."""
MEMORY = 32.0
"""Rows that a bin remembers, about."""
LINE_COUNT = 8.0
"""Observations that the line is worth in a bin: 2 is 1.5 % worse on the demo, 32 no better (docs/log.md, 24, Z4)."""



def copy_confidence(match_length: int) -> float:
    """Say how sure a copied token is, by how many tokens before it were alike: about what it is right (docs/log.md, 28)."""
    return 1 - 1 / match_length


_CONFIDENCES = [min(max(middle, 0.03), 0.9999) for middle in MIDPOINTS]
_LOG_ODDS = [math.log(value / (1 - value)) for value in _CONFIDENCES]
_WIDTHS = np.diff([0.0, *EDGES, 1.0])


class Chances:
    """Acceptance and confidence of each of `drafters`, from what is usual and what was seen."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.reset()

    def reset(self) -> None:
        self._heights = [0.0 if drafter is COPIES else PRIOR_HEIGHTS[drafter.bits] for drafter in self.drafters]
        self._slopes = [1.0] * len(self.drafters)
        self._spreads = [(SPREAD**2, 0.0, SLOPE_SPREAD**2)] * len(self.drafters)  # variances, covariance between them
        self._accepted = [[0.0] * NUM_BINS for _ in self.drafters]
        self._seen = [[0.0] * NUM_BINS for _ in self.drafters]
        self._looks = [[0.0] * NUM_BINS for _ in self.drafters]
        self.rows = [0] * len(self.drafters)

    def look(self, drafter: int, confidence: float) -> None:
        """Count a row that the drafter, by its number, looked at, whatever came of it."""
        looks = self._looks[drafter]
        looks[bin_of(confidence)] += 1
        if sum(looks) > 4 * MEMORY:
            looks[:] = [count / 2 for count in looks]

    def learn(self, drafter: int, confidence: float, accepted: float) -> None:
        """Learn what came of a row: 0 or 1, or the chance of acceptance when sampling."""
        index = bin_of(confidence)
        expected, odds = self._line(drafter, index), _LOG_ODDS[index]
        # One step of a logistic regression: the line's normal distribution, given one more row (an extended Kalman filter).
        height, both, slope = self._spreads[drafter]
        by_height, by_slope = height + both * odds, both + slope * odds
        weight = expected * (1 - expected)
        share = weight / (1 + weight * (by_height + by_slope * odds))
        height, both, slope = height - share * by_height**2, both - share * by_height * by_slope, slope - share * by_slope**2
        self._spreads[drafter] = height + CHANGE, both, slope + CHANGE / 10
        surprise = (accepted - expected) / (1 + weight * (by_height + by_slope * odds))
        self._heights[drafter] += surprise * by_height
        self._slopes[drafter] += surprise * by_slope
        if self._seen[drafter][index] >= MEMORY:
            self._seen[drafter][index] /= 2
            self._accepted[drafter][index] /= 2
        self._seen[drafter][index] += 1
        self._accepted[drafter][index] += accepted
        self.rows[drafter] += 1

    def of(self, drafter: int, confidence: float) -> float:
        """Estimate the chance that a token of this confidence is accepted, in (0, 1)."""
        return self._chance(drafter, bin_of(confidence))

    def tables(self) -> tuple[Array, Array]:
        """Return how often each bin of confidences occurs, and its chance of acceptance; [drafters, bins] each."""
        looks = np.array(self._looks)
        frequency = looks + _WIDTHS  # all confidences alike, until some were seen
        chances = [[self._chance(drafter, index) for index in range(NUM_BINS)] for drafter in range(len(self.drafters))]
        return frequency / frequency.sum(axis=1, keepdims=True), np.array(chances)

    def _line(self, drafter: int, index: int) -> float:
        return 1 / (1 + math.exp(-self._heights[drafter] - self._slopes[drafter] * _LOG_ODDS[index]))

    def _chance(self, drafter: int, index: int) -> float:
        seen, accepted = self._seen[drafter][index], self._accepted[drafter][index]
        return (accepted + LINE_COUNT * self._line(drafter, index)) / (seen + LINE_COUNT)

    def state(self) -> dict[str, Any]:
        """Return what was learned of each drafter, for JSON."""
        names = [str(drafter.saved_key) for drafter in self.drafters]
        found = zip(self._heights, self._certainty, self._accepted, self._seen, self._looks, self.rows)
        return {name: [height, sure, [*a], [*s], [*n], rows] for name, (height, sure, a, s, n, rows) in zip(names, found)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave of the drafters that are here; the others keep what is usual.

        Raises ValueError, and changes nothing, for what another version saved.
        """
        made = Chances(self.drafters)
        for index, drafter in enumerate(self.drafters):
            found = state.get(str(drafter.saved_key))
            if found is None:
                continue
            if len(found) != 6 or any(len(counts) != NUM_BINS for counts in found[2:5]):
                raise ValueError("the saved state was saved by another version")
            height, certainty, *counts, rows = found
            made._heights[index], made._certainty[index], made.rows[index] = float(height), float(certainty), int(rows)
            for kept, values in zip((made._accepted, made._seen, made._looks), counts):
                kept[index] = [float(value) for value in values]
        self.__dict__.update(made.__dict__)
