"""How often tokens are accepted at layers of which little was seen: what layers and confidences have in common.

In every model we looked at, and at each of its layers, the log odds of acceptance are close to a line in the log odds of
confidence; slopes are alike (0.9 to 1.4 at layers worth exiting at), and the line rises from layer to layer. So

    log odds(acceptance) = height[layer] + slope * log odds(confidence)

with a prior that says just this is fitted to a handful of rows, and a bin's own observations then correct it. Drafts through
all layers in fewer bits follow such lines as well, with a slope of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.auto.constants import TUNING
from policies.records import Drafter
from policies.spide import MIDPOINTS

Array = NDArray[np.float64]

_CONFIDENCE: Array = np.clip(MIDPOINTS, 0.03, 0.9999)
_LOG_ODDS: Array = np.log(_CONFIDENCE / (1 - _CONFIDENCE))


class AcceptanceModel:
    """Acceptance per exit layer and confidence bin, from counts and from what is usual.

    drafters: the exits, ascending, and after them the weights in fewer bits.
    num_layers: of the model, L.
    """

    def __init__(self, drafters: Sequence[Drafter], num_layers: int) -> None:
        self._drafters = tuple(drafters)
        self._size = len(drafters)
        exits = [drafter.exit_layer for drafter in drafters if drafter.bits is None]
        depth = np.log2(1 + 24 * np.asarray(exits) / num_layers)
        # Of weights in fewer bits the heights are their own: they have nothing in common with those of exits.
        spread = TUNING.rounded_spread**2 * np.eye(self._size)
        spread[: len(exits), : len(exits)] = TUNING.height_spread**2 + TUNING.spread**2 * (
            np.minimum.outer(depth, depth) + np.eye(len(exits))
        )
        self._slopes = _slopes(drafters)
        size, count = self._size, self._slopes.shape[0]
        self._precision = np.zeros((size + count, size + count))
        self._precision[:size, :size] = np.linalg.inv(spread)
        self._precision[range(size, size + count), range(size, size + count)] = 1 / TUNING.spread**2
        heights = [TUNING.height if bits is None else TUNING.rounded_heights[bits] for _, bits in drafters]
        self._prior = np.array([*heights, *[TUNING.slope] * count])
        self.reset()

    def reset(self) -> None:
        self._parameters = self._prior.copy()

    def fit(self, accepted: Array, seen: Array) -> None:
        """Bring heights and slope nearer to counts, [drafters, bins], fractions allowed: a step of a logistic regression.

        The prior is Gaussian. One step of Newton's method from where the last fit ended decides as well as several.
        """
        expected = self._line()
        missing = accepted - seen * expected
        weight = seen * expected * (1 - expected)
        size, slopes = self._size, self._slopes
        gradient = -self._precision @ (self._parameters - self._prior)
        gradient[:size] += missing.sum(axis=1)
        gradient[size:] += slopes @ (missing * _LOG_ODDS).sum(axis=1)
        curvature = self._precision.copy()
        curvature[range(size), range(size)] += weight.sum(axis=1)
        shared = slopes * (weight * _LOG_ODDS).sum(axis=1)
        curvature[size:, :size] += shared
        curvature[:size, size:] += shared.T
        curvature[size:, size:] += np.diag(slopes @ (weight * _LOG_ODDS**2).sum(axis=1))
        step = np.linalg.solve(curvature, gradient)
        before = self._log_probability(self._parameters, accepted, seen)
        while np.abs(step).max() > 1e-6 and self._log_probability(self._parameters + step, accepted, seen) < before:
            step *= 0.25  # far from the optimum Newton's steps overshoot
        self._parameters += step

    def acceptance(self, accepted: Array, seen: Array) -> Array:
        """Estimate it for every drafter and bin, in (0, 1): a mean of what the fit says and what was seen there."""
        result: Array = (accepted + TUNING.fit_count * self._line()) / (seen + TUNING.fit_count)
        return result

    def _line(self) -> Array:
        """Compute acceptance by the parameters alone, [drafters, bins]."""
        line: Array = 1 / (1 + np.exp(-self._log_odds(self._parameters)))
        return line

    def _log_probability(self, parameters: Array, accepted: Array, seen: Array) -> float:
        """Log probability of these parameters given the counts, up to a constant."""
        odds, off = self._log_odds(parameters), parameters - self._prior
        return float((accepted * odds - seen * np.logaddexp(0.0, odds)).sum() - 0.5 * off @ self._precision @ off)

    def state(self) -> dict[str, Any]:
        return {"parameters": self._parameters.tolist()}

    def restore(self, state: dict[str, Any], drafters: Sequence[Drafter]) -> None:
        """Take up what `state` of a model of these drafters gave; drafters that it lacks keep the prior.

        Raises ValueError if it has another number of parameters.
        """
        parameters = np.asarray(state["parameters"], dtype=np.float64)
        if parameters.shape != (len(drafters) + len(_slopes(drafters)),):
            raise ValueError(f"the saved fit has {parameters.size} parameters, for {len(drafters)} drafters")
        known = dict(zip(drafters, parameters))
        heights = [known.get(drafter, prior) for drafter, prior in zip(self._drafters, self._prior)]
        slopes = [*parameters[len(drafters) :], *self._prior[self._size :]]
        self._parameters = np.array([*heights, slopes[0], *slopes[1 : len(self._slopes)]])

    def _log_odds(self, parameters: Array) -> Array:
        """Log odds of acceptance, [drafters, bins]. parameters: heights, then slopes."""
        slopes = parameters[self._size :] @ self._slopes
        odds: Array = parameters[: self._size, None] + slopes[:, None] * _LOG_ODDS
        return odds


def _slopes(drafters: Sequence[Drafter]) -> Array:
    """1 where a drafter has a slope, [slopes, drafters]: the first is that of all exits, the second that of fewer bits."""
    exits = np.array([drafter.bits is None for drafter in drafters])
    return np.array([exits] if exits.all() else [exits, ~exits], dtype=np.float64)
