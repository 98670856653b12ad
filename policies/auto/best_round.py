"""The round that is worth most, and what going on with a draft is worth: the dynamic program of `policies.auto.policy`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.auto.round_costs import RoundCosts

MARGIN, MARGIN_OF_SHORT = 1.03, 1.1
"""By how much a round must beat a plain step, and a short one: less may be an error of the estimates."""
TOLERANCE, MOST_STEPS = 0.1, 5
"""Relative change of the rate below which another of Dinkelbach's steps is not worth its time, and how many there may be."""

_GRID = np.concatenate([[0.0], np.geomspace(0.03, 1.0, 11)])  # reliabilities at which values are tabulated
_POINTS: list[float] = _GRID.tolist()


class DraftValues:
    """The dynamic program: what drafting on is worth at each depth, reliability and layer.

    frequency: chance of each confidence bin, [layers, bins]. acceptance: of each bin, [layers, bins]. step_cost: cost of the
    j-th draft, [layers, depths]; look_cost: of norm and head for one row, [layers]. All costs are already multiplied by r.
    """

    def __init__(
        self,
        frequency: NDArray[np.float64],
        acceptance: NDArray[np.float64],
        step_cost: NDArray[np.float64],
        look_cost: NDArray[np.float64],
    ) -> None:
        (layers, depths), bins, size = step_cost.shape, frequency.shape[1], len(_GRID)
        # Reliability after keeping, [layers, bins * grid].
        reached = (_GRID * acceptance[:, :, None]).reshape(layers, -1)
        low = np.clip(np.searchsorted(_GRID, reached, side="right") - 1, 0, size - 2)
        share = (reached - _GRID[low]) / (_GRID[low + 1] - _GRID[low])
        # What keeping a draft is worth is linear in the values one draft later, between the two points of the grid around the
        # reliability then reached, plus that reliability, less the cost of the step.
        weights = np.zeros((layers, size + 2, bins * size))
        np.put_along_axis(weights, low[:, None], (1 - share)[:, None], axis=1)
        np.put_along_axis(weights, low[:, None] + 1, share[:, None], axis=1)
        weights[:, size] = reached
        weights[:, size + 1] = 1.0
        # Two numbers at every point: what going on is worth, and how many drafts it is expected to have accepted.
        table = np.zeros((layers, 2, size + 2))
        table[:, :, size] = 1.0
        mean = table[:, :, :size]
        ahead = np.zeros((depths + 1, layers, size))
        bin_chances = frequency[:, None, None]
        # Products this small are done by the calling thread. Larger ones would wake the library's own threads, which spin on
        # for milliseconds, on the cores that decode.
        for depth in range(depths - 1, -1, -1):
            table[:, 0, -1] = -step_cost[:, depth]
            kept = table @ weights
            kept *= kept[:, :1] > 0  # a draft that is not worth its cost is not kept
            np.matmul(bin_chances, kept.reshape(layers, 2, bins, size), out=mean[:, :, None])
            mean[:, 0] -= look_cost[:, None]
            mean *= mean[:, :1] > 0
            ahead[depth] = mean[:, 0]
        # At the start of a round, [layers]: what drafting is worth, and how many drafts it is expected to have accepted.
        self.start, self.accepted = ahead[0, :, -1], mean[:, 1, -1]
        self._ahead: list[list[list[float]]] = ahead.tolist()  # single numbers of an array cost ten times as much

    def after(self, layer_index: int, depth: int, reliability: float) -> float:
        """Value of going on after `depth` drafts that are all accepted with chance `reliability`."""
        if depth >= len(self._ahead):
            return 0.0
        values = self._ahead[depth][layer_index]
        above = bisect_left(_POINTS, reliability, 1, len(_POINTS) - 1)
        low, high = _POINTS[above - 1], _POINTS[above]
        return values[above - 1] + (reliability - low) / (high - low) * (values[above] - values[above - 1])


@dataclass(frozen=True, slots=True, eq=False)
class BestRound:
    """The best round of some drafters.

    index: of its drafter. tokens, cost: that are expected of it. rate: tokens per cost, at least a plain step's. pays:
    whether it is better than that. price: the rate that `values` were worked out at.
    """

    index: int
    tokens: float
    cost: float
    rate: float
    pays: bool
    price: float
    values: DraftValues


def best_round(
    costs: RoundCosts,
    frequency: NDArray[np.float64],
    acceptance: NDArray[np.float64],
    usable: Sequence[bool],
    rate: float,
    margin: float = MARGIN,
) -> BestRound:
    """Find the best round: steps of Dinkelbach's method from a rate that is nearly right.

    frequency: of each bin of confidences, acceptance: of each, [drafters, bins]. usable: which drafters may make it.
    """
    plain = 1 / costs.plain
    rate, unusable = max(rate, plain), np.where(usable, 0.0, np.inf)
    for _ in range(MOST_STEPS):
        values = DraftValues(frequency, acceptance, rate * costs.steps, rate * costs.looks)
        start = values.start
        worth = 1 - rate * costs.rounds[:, 0] + start - unusable
        index = int(worth.argmax())
        if not usable[index]:
            return BestRound(index, 1.0, costs.plain, plain, False, rate, values)
        tokens = 1 + float(values.accepted[index])
        cost = (tokens - float(worth[index])) / rate
        price, rate = rate, max(tokens / cost, plain)
        if abs(rate / price - 1) < TOLERANCE:
            break
    pays = bool(start[index] > 0 and rate > margin * plain)
    return BestRound(index, tokens, cost, rate if pays else plain, pays, price, values)
