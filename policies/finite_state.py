"""FS, the finite-state length: one token longer after a fully accepted round, one shorter otherwise."""

from __future__ import annotations

from typing import Any

from policies.base import NeverStop
from policies.building import Setup
from policies.records import DraftRow, RoundRecord

MAX_LENGTH = 20  # where the growth ends; a draft of 20 tokens that is accepted as a whole has nothing left to gain


class FiniteStateLength(NeverStop):
    """Draft `start` tokens in the first round; then one more after each round whose drafts were all accepted, else one fewer.

    At least 1, at most `max_length`. A round cut short by the plan's cap or by an EOS counts by what it drafted.
    Raises ValueError for a start outside [1, max_length].
    Source: the finite-state baseline of DEL (Entezari Zarch et al. 2025), section 5 and Appendix B.
    """

    def __init__(self, start: int, *, max_length: int = MAX_LENGTH) -> None:
        if not 1 <= start <= max_length:
            raise ValueError(f"the first length must be in [1, {max_length}], got {start}")
        self._start = start
        self.max_length = max_length
        self.length = start

    @classmethod
    def from_args(cls, setup: Setup, length: int = 4) -> FiniteStateLength:
        """Built from its name's ARGS (`policies.names`)."""
        return cls(length)

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """When the current length is reached."""
        return row.num_drafted + 1 >= self.length

    def observe(self, record: RoundRecord) -> None:
        """Move the length by one."""
        if record.num_drafted == 0:
            return
        step = 1 if record.num_accepted == record.num_drafted else -1
        self.length = min(max(self.length + step, 1), self.max_length)

    def reset(self) -> None:
        """Back to the first length."""
        self.length = self._start

    def state(self) -> dict[str, Any]:
        """The current length."""
        return {"length": self.length}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a length that `state` gave."""
        self.length = int(state["length"])
