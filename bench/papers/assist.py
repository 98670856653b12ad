"""The draft length of transformers' assisted generation, which Pacer's tables call Assist."""

from __future__ import annotations

from policies.fixed import FiniteStateLength
from policies.records import RoundRecord


class Assist(FiniteStateLength):
    """Draft two tokens more after a round whose drafts were all accepted, else one fewer, from 5 on and never below 1.

    Source: the dynamic length of assisted generation (Gante 2023), "heuristic" in transformers.
    """

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)

    def observe(self, record: RoundRecord) -> None:
        if record.exit_layer is not None:
            self.length = max(1, self.length + (2 if record.num_accepted == record.num_drafted else -1))
