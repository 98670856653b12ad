"""Layer 0: copy what followed the same words earlier, and let the model verify it (`copy:G`)."""

from __future__ import annotations

from typing import Any

from policies.base import StatelessPolicy
from policies.bounds import check_number
from policies.building import Setup
from policies.records import ObservationSpec, Plan, RoundContext

LENGTH = 10
"""Longest copy by default, as in prompt lookup decoding (Saxena 2023)."""
SHORTEST = 2
"""Shortest match that is copied from."""
LONGEST_MATCH = 1 << 20
"""The longest match that may be asked for. It costs nothing: a text without one is not copied from."""
MOST = 32
"""Longest copy that may be asked for: a pass over more rows costs what their arithmetic costs, on any device."""


class CopyExit(StatelessPolicy):
    """Copy `length` tokens after a match of `shortest` or more and verify them at once; elsewhere a plain step.

    Raises ValueError for a length outside [1, MOST], and for a match shorter than 2, which is no more than a guess.
    """

    observes = ObservationSpec(copies="needed")
    exit_layers = ()

    def __init__(self, length: int = LENGTH, shortest: int = SHORTEST) -> None:
        if not 1 <= length <= MOST:
            raise ValueError(f"the length must be in [1, {MOST}], got {length}")
        self._length, self._shortest = length, check_number("min", shortest, SHORTEST, LONGEST_MATCH)

    @classmethod
    def from_args(cls, setup: Setup, length: int = LENGTH, **options: Any) -> CopyExit:
        return cls(length, options.get("min", SHORTEST))

    def plan(self, context: RoundContext) -> Plan:
        copied = self._length if context.match_length >= self._shortest else 0
        return Plan(exit_layer=None, max_speculations=0, copied=copied)
