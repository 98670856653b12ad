"""FS, the finite-state length: one token longer after a fully accepted round, one shorter otherwise."""

from __future__ import annotations

from typing import Any

from policies.base import NeverStop
from policies.bounds import MAX_DRAFTS, check_number
from policies.records import DraftRow, RoundRecord

MAX_LENGTH = 20  # where the growth ends; a draft of 20 tokens that is accepted as a whole has nothing left to gain


class FiniteStateLength(NeverStop):
    """Draft `length` tokens in the first round; then one more after a round whose drafts were all accepted, else one fewer.

    At least 1, at most `max_length`. A round cut short by the plan's cap or by an EOS counts by what it drafted.
    Raises ValueError for a length outside [1, max_length].
    Source: the finite-state baseline of DEL (Entezari Zarch et al. 2025), section 5 and Appendix B.
    """

    def __init__(self, length: int = 4, *, max_length: int = MAX_LENGTH) -> None:
        check_number("max_length", max_length, 1, MAX_DRAFTS)
        if not 1 <= length <= max_length:
            raise ValueError(f"the first length must be in [1, {max_length}], got {length}")
        self._start = length
        self.max_length = max_length
        self.length = length

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        return row.num_drafted + 1 >= self.length

    def observe(self, record: RoundRecord) -> None:
        if record.exit_layer is None or record.num_drafted == 0:
            return
        step = 1 if record.num_accepted == record.num_drafted else -1
        self.length = min(max(self.length + step, 1), self.max_length)

    def reset(self) -> None:
        self.length = self._start

    def state(self) -> dict[str, Any]:
        return {"length": self.length}

    def restore(self, state: dict[str, Any]) -> None:
        self.length = int(state["length"])
