"""The rows of a prepared batch of transformers' `generate`, each as a call of its own.

The engine has no padding. Logits processors and stopping criteria that transformers prepared for the batch get the row with
its padding, because they would see that in plain `generate`, and lengths such as `min_new_tokens` are counted in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from selfspec.engine.sampling import prefix_free

_ROW_BY_ROW = (
    logits_process.ExponentialDecayLengthPenalty, logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor, logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor, logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor, logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor, logits_process.TopHLogitsWarper,
    logits_process.WatermarkLogitsProcessor, MaxTimeCriteria, StopStringCriteria,
)  # fmt: skip
"""Processors and criteria that treat all rows of a batch alike, so that they can be given one row alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRow:
    """One row of a batch. padding: int64 [1, p], on the left. prompt: int64 [n]."""

    index: int
    batch_size: int
    padding: Tensor
    prompt: Tensor

    def padded(self, ids: Tensor) -> Tensor:
        """Put the row's text after its padding, as in the batch; [1, length]."""
        return torch.cat([self.padding.to(ids.device), ids], dim=1) if self.padding.numel() else ids

    @property
    def alone(self) -> bool:
        """True if the batch is only this row, without padding."""
        return self.batch_size == 1 and not self.padding.numel()

    def copies_for(self, processor: Any) -> tuple[int, int]:
        """Return how many copies of the row it gets, a batch where it may keep something for each row, and whose output."""
        return (1, 0) if type(processor) in _ROW_BY_ROW else (self.batch_size, self.index)


def split_rows(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> list[BatchRow]:
    """Split a batch, int64 [rows, length], into its rows, without their padding.

    attention_mask: [rows, length], zeros only on the left. position_ids: [rows or 1, length]; each row must count from 0
    after its padding. Raises ValueError for padding elsewhere, an empty row, or other positions.
    """
    num_rows, length = input_ids.shape
    ids = input_ids.detach().to("cpu", torch.long, copy=True)
    mask = torch.ones(ids.shape, dtype=torch.bool) if attention_mask is None else attention_mask.to("cpu") != 0
    positions = None if position_ids is None else position_ids.to("cpu").expand(num_rows, -1)
    rows = []
    for index in range(num_rows):
        num_padded = length - int(mask[index].sum())
        if num_padded == length:
            raise ValueError(f"row {index} of the batch holds nothing but padding: give every row at least one token")
        if bool(mask[index, :num_padded].any()):
            remedy = "set padding_side='left' in the tokenizer, and pass its attention_mask"
            raise ValueError(f"row {index} of the batch is not padded on the left (zeros after ones): {remedy}")
        padding, prompt = ids[index : index + 1, :num_padded], ids[index, num_padded:]
        if positions is not None and positions[index, num_padded:].tolist() != [*range(prompt.numel())]:
            raise ValueError("position_ids other than 0, 1, 2, .. after the padding are not supported: leave them out")
        rows.append(BatchRow(index=index, batch_size=num_rows, padding=padding, prompt=prompt))
    return rows


def row_processor(processor: Any, row: BatchRow) -> Any:
    """Make what does for one row what the processor does for the batch: it gets copies of the row, and one output is used."""
    # Prefix-free processors do not see the text, and the engine runs them over many positions at once.
    if row.alone or type(processor) in prefix_free():
        return processor
    if type(processor) is logits_process.RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length  # for each row, if there is padding
        if isinstance(ignored, Tensor):
            ignored = ignored[row.index : row.index + 1]
        processor = logits_process.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored)
        row = replace(row, index=0, batch_size=1)
    copies, place = row.copies_for(processor)

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        found = processor(row.padded(input_ids).repeat(copies, 1), scores.repeat(copies, 1))
        return found[place : place + 1]

    return process


def row_criterion(criterion: Any, row: BatchRow) -> Any:
    """Make what answers for one row as the stopping criterion does for the batch; it gets copies as in `row_processor`."""
    if row.alone:
        return criterion
    copies, place = row.copies_for(criterion)

    def may_end(input_ids: Tensor, scores: Any) -> Any:
        answer = criterion(row.padded(input_ids).repeat(copies, 1), scores)
        whole = isinstance(answer, Tensor) and answer.numel() == copies
        return answer.reshape(-1)[place] if whole else answer

    return may_end


class StopTogether:
    """Makes all rows end with the last one, as transformers does without an EOS token. What a row got meanwhile is output."""

    def __init__(self, num_rows: int, max_new_tokens: int) -> None:
        self._max_new_tokens = max_new_tokens
        self._ended: list[int | None] = [None] * num_rows

    @property
    def num_new(self) -> int:
        """New tokens of every row in the output, once all have ended."""
        return max((count for count in self._ended if count is not None), default=self._max_new_tokens)

    def criterion(self, criteria: Sequence[Any], row: BatchRow) -> Callable[..., bool]:
        """Make the criterion of one row, in place of its own criteria."""

        def may_end(input_ids: Tensor, scores: Any) -> bool:
            holds = any(bool(torch.as_tensor(criterion(input_ids, scores)).any()) for criterion in criteria)
            count = input_ids.shape[1] - row.prompt.numel()
            if self._ended[row.index] is None and (holds or count == self._max_new_tokens):
                self._ended[row.index] = count
            return None not in self._ended and count >= self.num_new

        return may_end
