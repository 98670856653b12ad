"""What `auto` knows of copied tokens: how often they are right, and how many are worth their rows.

The copy index says of every committed token what it would have copied, so acceptance by match length is learned at no cost,
also where nothing is copied. A copy of c tokens, verified at once, is worth

    1 + sum of (chance that the first i are right), i = 1 .. c,  -  r * (cost of the round)

at a rate r of tokens per cost. It is made where that is more than what drafting, or a plain step, is worth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from policies.auto.constants import TUNING

_LENGTHS = (2, 3, 4, 5, 6, 8, 12, 16, 32)
"""Match lengths from which on another chance holds."""
_PRIOR = (0.25, 0.35, 0.45, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Usual chances. Higher or lower ones by .1 decide no better (docs/log.md, 23, Z3)."""


class CopyChoice(NamedTuple):
    """How many tokens to copy, and what the round is then worth."""

    copied: int
    value: float


class CopyTable:
    """How often a copied token was right, by how many tokens before it were alike."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._right = [TUNING.copy_prior * chance for chance in _PRIOR]
        self._seen = [TUNING.copy_prior] * len(_PRIOR)

    def observe(self, copies: Sequence[tuple[int, bool]]) -> None:
        """Learn from `RoundRecord.copies`. The latest ones count most."""
        for length, right in copies:
            index = bisect_right(_LENGTHS, length) - 1
            if self._seen[index] >= TUNING.copy_memory:
                self._seen[index] /= 2
                self._right[index] /= 2
            self._seen[index] += 1
            self._right[index] += right

    def chance(self, match_length: int) -> float:
        """Chance that the next token is what followed a match of this length."""
        index = bisect_right(_LENGTHS, match_length) - 1
        return self._right[index] / self._seen[index]

    def state(self) -> dict[str, Any]:
        return {"right": [*self._right], "seen": [*self._seen]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. Raises ValueError for another version's."""
        if not len(state["right"]) == len(state["seen"]) == len(_PRIOR):
            raise ValueError(f"the saved state has {len(state['right'])} match lengths, this version {len(_PRIOR)}")
        self._right = [float(count) for count in state["right"]]
        self._seen = [float(count) for count in state["seen"]]


def best_copy(table: CopyTable, costs: Sequence[float], match_length: int, rate: float) -> CopyChoice:
    """Return how many tokens to copy after a match of this length, at this rate of tokens per cost.

    costs: of a round that copies 0, 1, 2, ... tokens. The choice is at least 1 and at most what there are costs for.
    """
    best = CopyChoice(0, float("-inf"))
    reliability, tokens = 1.0, 1.0
    for copied in range(1, len(costs)):
        reliability *= table.chance(match_length + copied - 1)
        tokens += reliability
        value = tokens - rate * costs[copied]
        if value > best.value:
            best = CopyChoice(copied, value)
    return best
