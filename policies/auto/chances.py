"""How often a draft is accepted, by what drafted it and how sure that was.

In every model we looked at, the log odds of acceptance are nearly a line in the log odds of confidence. So a drafter has a
height and a slope, which a few rows of any confidence move. What was seen in a bin of confidences corrects the line there, as
observations correct the mean of a Beta distribution. All of it fades, since texts change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.records import Drafter
from policies.spide import EDGES, MIDPOINTS, NUM_BINS, bin_of

Array = NDArray[np.float64]

COPIES = Drafter(0)
"""The drafter of copied tokens: they are taken from where the text ended like this before, and go through no layer."""
PRIOR_HEIGHTS = {None: -1.0, 8: 4.5, 4: 2.0}
"""By bits; None is an exit, which starts low: exits pay only in models that were trained to exit early. Those of drafts in 8
and 4 bits were measured on 16 free answers of SmolLM2 (docs/log.md, 24, Z5)."""
SPREAD, SLOPE_SPREAD = 2.0, 0.5
"""Prior standard deviations of a height and of a slope, whose mean is 1: what is usual is soon given up."""
CHANGE = 0.01
"""Variance that each row adds to a height, and ten times what it adds to a slope: a line remembers some thirty rows."""
LINE_COUNT = 8.0
"""Observations that the line is worth in a bin: 4 is 2 % worse on the demo, 16 is level (docs/log.md, 28, Z4)."""
BIN_MEMORY, LOOKS_MEMORY = 64.0, 256.0
"""Observations at which the older ones of a bin, and of all confidences, are halved."""
SAMPLED_WORTH = 8.0
"""Greedy rows that a sampled one is worth: its chance is a mean over all tokens, where a greedy row is a toss of a coin."""

_CLIPPED = [min(max(middle, 0.03), 0.9999) for middle in MIDPOINTS]
_LOG_ODDS = [math.log(value / (1 - value)) for value in _CLIPPED]
_WIDTHS = np.diff([0.0, *EDGES, 1.0])


def copy_confidence(match_length: int) -> float:
    """Say how sure a copied token is, by how many tokens before it were alike: about how often it is right."""
    return 1 - 1 / match_length


@dataclass(slots=True)
class _Drafter:
    """Holds what is known of one drafter.

    height, slope: of its line, with their variances and covariance. accepted, seen: by bin. looks: rows looked at, by bin.
    rows: of which it was seen what came of them.
    """

    height: float
    slope: float = 1.0
    height_variance: float = SPREAD**2
    slope_variance: float = SLOPE_SPREAD**2
    covariance: float = 0.0
    accepted: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    seen: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    looks: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    rows: int = 0

    def line(self, index: int) -> float:
        return 1 / (1 + math.exp(-self.height - self.slope * _LOG_ODDS[index]))

    def chance(self, index: int) -> float:
        return (self.accepted[index] + LINE_COUNT * self.line(index)) / (self.seen[index] + LINE_COUNT)

    def learn(self, index: int, accepted: float, worth: float) -> None:
        """Learn one row: a step of a logistic regression whose line has a normal distribution (an extended Kalman filter)."""
        expected, odds = self.line(index), _LOG_ODDS[index]
        weight = expected * (1 - expected)
        by_height, by_slope = (
            self.height_variance + self.covariance * odds,
            self.covariance + self.slope_variance * odds,
        )
        share = 1 / (1 / worth + weight * (by_height + by_slope * odds))
        self.height += share * (accepted - expected) * by_height
        self.slope += share * (accepted - expected) * by_slope
        self.height_variance += CHANGE - share * weight * by_height**2
        self.slope_variance += CHANGE / 10 - share * weight * by_slope**2
        self.covariance -= share * weight * by_height * by_slope
        if self.seen[index] >= BIN_MEMORY:
            self.seen[index] /= 2
            self.accepted[index] /= 2
        self.seen[index] += 1
        self.accepted[index] += accepted
        self.looks[index] += 1
        if sum(self.looks) > LOOKS_MEMORY:
            self.looks[:] = [count / 2 for count in self.looks]
        self.rows += 1


class Chances:
    """Acceptance and confidence of each of `drafters`, by their index, from what is usual and what was seen."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.reset()

    def reset(self) -> None:
        self._known = [_Drafter(0.0 if one == COPIES else PRIOR_HEIGHTS[one.bits]) for one in self.drafters]

    @property
    def rows(self) -> list[int]:
        """Rows of each drafter of which it was seen what came of them."""
        return [known.rows for known in self._known]

    def learn(self, drafter: int, confidence: float, accepted: float, sampled: bool = False) -> None:
        """Learn what came of a row: 0 or 1, or the chance of acceptance when tokens are sampled."""
        self._known[drafter].learn(bin_of(confidence), accepted, SAMPLED_WORTH if sampled else 1.0)

    def of(self, drafter: int, confidence: float) -> float:
        """Estimate the chance that a token of this confidence is accepted, in (0, 1)."""
        return self._known[drafter].chance(bin_of(confidence))

    def tables(self) -> tuple[Array, Array]:
        """Return how often each bin of confidences occurs, and its chance of acceptance; [drafters, bins] each."""
        frequency = _WIDTHS + [known.looks for known in self._known]  # all confidences alike, until some were seen
        chances = [[known.chance(index) for index in range(NUM_BINS)] for known in self._known]
        return frequency / frequency.sum(axis=1, keepdims=True), np.array(chances)

    def state(self) -> dict[str, Any]:
        """Return what was learned of each drafter, for JSON."""
        return {str(drafter.saved_key): asdict(known) for drafter, known in zip(self.drafters, self._known)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave of the drafters that are here; the others keep what is usual.

        Raises ValueError, and changes nothing, for what another version saved.
        """
        try:
            saved = {key: _Drafter(**values) for key, values in state.items()}
            for one in saved.values():
                counts = [one.accepted, one.seen, one.looks]
                line = one.height, one.slope, one.height_variance, one.slope_variance, one.covariance, one.rows
                numbers = [*line, *chain(*counts)]
                if any(len(each) != NUM_BINS for each in counts) or not all(map(math.isfinite, numbers)):
                    raise TypeError
        except (TypeError, AttributeError):
            raise ValueError("the saved state was saved by another version") from None
        made = Chances(self.drafters)
        self._known = [saved.get(str(drafter.saved_key), usual) for drafter, usual in zip(self.drafters, made._known)]
