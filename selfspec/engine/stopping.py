"""When a text ends: EOS, transformers' stopping criteria (stop strings among them), max_new_tokens, to the exact token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

StopReason = Literal["eos", "stop_string", "max_time", "stopping_criteria", "length"]
"""Why a text ended: an end-of-sequence token, a stop string, the time limit, another criterion, or max_new_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StopConditions:
    """All conditions of one call.

    eos: ids that end the text (kept as its last token). criteria: transformers' criteria, called for every committed token
    with the text up to it, on the CPU whatever the model's device. max_new_tokens: at least 1. clocks: those criteria that
    count from when the text joins, as `max_time` does; a caller's own one counts from when it was made.
    """

    eos: frozenset[int]
    criteria: StoppingCriteriaList
    max_new_tokens: int
    clocks: tuple[MaxTimeCriteria, ...] = ()

    def start(self) -> None:
        """Start the clocks: the text begins now."""
        for clock in self.clocks:
            clock.initial_timestamp = time.time()

    def first_stop(
        self, block: Sequence[int], text: Tensor | None, length: int, num_new: int
    ) -> tuple[int, StopReason | None]:
        """Count the tokens of a block that are committed, and give the reason if the text ends there.

        block: the round's tokens. text: int64 [1, capacity] on the CPU, so that no criterion waits for a device; it holds the
        block already, at positions length .. None where there are no criteria. num_new: new tokens before the block.
        """
        assert text is not None or not self.criteria
        for count, token in enumerate(block, start=1):
            reason = None if text is None else self._reason(text[:, : length + count])
            if token in self.eos:
                reason = "eos"
            if reason is None and num_new + count == self.max_new_tokens:
                reason = "length"
            if reason is not None:
                return count, reason
        return len(block), None

    def _reason(self, prefix: Tensor) -> StopReason | None:
        for criterion in self.criteria:
            answer = criterion(prefix, None)  # a tensor (bool [1], as transformers' own give), a Python or a NumPy bool
            if bool((answer if isinstance(answer, Tensor) else torch.as_tensor(answer, device="cpu")).any()):
                return _reason_of(criterion)
        return None


def _reason_of(criterion: StoppingCriteria) -> StopReason:
    from transformers import MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
    from transformers.generation.stopping_criteria import EosTokenCriteria

    if isinstance(criterion, StopStringCriteria):
        return "stop_string"
    if isinstance(criterion, MaxTimeCriteria):
        return "max_time"
    if isinstance(criterion, EosTokenCriteria):
        return "eos"
    return "length" if isinstance(criterion, MaxLengthCriteria) else "stopping_criteria"
