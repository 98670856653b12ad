"""What going on with a draft is worth: dynamic program of `auto` (`policies.auto.policy`), from the longest draft back."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

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
        self._start = ahead[0, :, -1]
        self._ahead: list[list[list[float]]] = ahead.tolist()  # single numbers of an array cost ten times as much
        self._drafts = mean[:, 1]

    def start(self) -> NDArray[np.float64]:
        """Value of drafting at the start of a round, [layers]."""
        return self._start

    def accepted(self) -> NDArray[np.float64]:
        """Return the expected number of accepted drafts of a round that follows these values, [layers]."""
        return self._drafts[:, -1]

    def after(self, layer_index: int, depth: int, reliability: float) -> float:
        """Value of going on after `depth` drafts that are all accepted with chance `reliability`."""
        if depth >= len(self._ahead):
            return 0.0
        values = self._ahead[depth][layer_index]
        above = bisect_left(_POINTS, reliability, 1, len(_POINTS) - 1)
        low, high = _POINTS[above - 1], _POINTS[above]
        return values[above - 1] + (reliability - low) / (high - low) * (values[above] - values[above - 1])
