"""Layer 0: copy what followed the same words earlier, and let the model verify it (`copy:G`), or let an exit cut it first
(`copy+ls:E-G` and the like).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policies.base import DelegatingPolicy, ExitPolicy, Policy, StatelessPolicy
from policies.bounds import check_number
from policies.building import Setup
from policies.records import ObservationSpec, Plan, RoundContext, RoundRecord

LENGTH = 10
"""Longest copy by default, as in prompt lookup decoding (Saxena 2023)."""
SHORTEST = 2
"""Shortest match that is copied from."""
LONGEST_MATCH = 1 << 20
"""The longest match that may be asked for. It costs nothing: a text without one is not copied from."""
MOST = 32
"""Longest copy that may be asked for: a pass over more rows costs what their arithmetic costs, on any device."""


class _Copying:
    """How much to copy: `length` tokens, where the last `shortest` or more occurred before.

    Raises ValueError for a length outside [1, MOST], and for a match shorter than 2, which is no more than a guess.
    """

    def __init__(self, length: int = LENGTH, shortest: int = SHORTEST) -> None:
        if not 1 <= length <= MOST:
            raise ValueError(f"the length must be in [1, {MOST}], got {length}")
        self._length, self._shortest = length, check_number("min", shortest, SHORTEST, LONGEST_MATCH)

    def copied(self, context: RoundContext) -> int:
        """Tokens to copy in the coming round."""
        return self._length if context.match_length >= self._shortest else 0


class CopyExit(_Copying, StatelessPolicy):
    """Copy `length` tokens after a match of `shortest` or more and verify them at once; elsewhere a plain step."""

    observes = ObservationSpec(copies="needed")
    exit_layers = ()

    @classmethod
    def from_args(cls, setup: Setup, length: int = LENGTH, **options: Any) -> CopyExit:
        return cls(length, options.get("min", SHORTEST))

    def plan(self, context: RoundContext) -> Plan:
        return Plan(exit_layer=None, max_speculations=0, copied=self.copied(context))


class CopyThenExit(_Copying, DelegatingPolicy):
    """Copy first, then do what another exit policy plans. Its exit cuts the copy where it disagrees, and drafts from there.

    inner: sees rounds as if the copied tokens had been committed before them.
    """

    def __init__(self, inner: ExitPolicy, length: int = LENGTH, shortest: int = SHORTEST) -> None:
        super().__init__(length, shortest)
        self.learner: ExitPolicy = inner

    @property
    def observes(self) -> ObservationSpec:
        return self.learner.observes | CopyExit.observes

    @property
    def exit_layers(self) -> tuple[int, ...] | None:
        return self.learner.exit_layers

    def plan(self, context: RoundContext) -> Plan:
        """The inner policy's plan, with copies before its drafts. Without an exit layer they are verified at once."""
        return replace(self.learner.plan(context), copied=self.copied(context))

    def observe(self, record: RoundRecord) -> None:
        self.learner.observe(record.without_copies)


def copying_first(policy: Policy, length: int = LENGTH, **options: Any) -> Policy:
    """The policy, with a copy before each of its drafts. Raises ValueError for one that copies already."""
    if policy.exit.observes.copies != "none":
        raise ValueError(f"{policy.name!r} copies by itself")
    return replace(policy, exit=CopyThenExit(policy.exit, length, options.get("min", SHORTEST)))
