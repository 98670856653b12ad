"""Draft traces, from which Pacer's pre-verifier learns: their labels, and a response with all its drafts as one sequence.

Source: Pacer (Zhang et al. 2025), section 3.3 and Appendix D.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrace:
    """One response at one exit layer: the text's exit hidden states, and drafts from several of its positions. On the CPU.

    context: [n, hidden], exit hidden states of the text's rows. starts: int64 [drafts], tokens committed before each draft:
    its first row, at position start - 1, sees the context's rows 0 .. start - 2. lengths: int64 [drafts], rows of each.
    accepted: int64 [drafts], tokens before the first mismatch with the response. hidden: [rows, hidden], of the rows that
    produced the drafts. features: float32 [rows, features], see selfspec.pacer.network.FEATURES.
    """

    exit_layer: int
    context: Tensor
    starts: Tensor
    lengths: Tensor
    accepted: Tensor
    hidden: Tensor
    features: Tensor

    def draft_index(self) -> Tensor:
        """Give the number of each row in its draft, from 1: int64 [rows]."""
        return torch.cat([_numbers(1, length + 1) for length in self.lengths.tolist()])

    def draft_of_row(self) -> Tensor:
        """Return which draft each row belongs to: int64 [rows]."""
        return _numbers(0, len(self.lengths)).repeat_interleave(self.lengths)

    def labels(self) -> Tensor:
        """1 for the tokens before the draft's first mismatch, 0 from there on: float32 [rows]."""
        return (self.draft_index() <= self.accepted[self.draft_of_row()]).float()

    def fate_known(self) -> Tensor:
        """Rows up to and including the first mismatch, whose own acceptance verification decides: bool [rows]."""
        return self.draft_index() <= self.accepted[self.draft_of_row()] + 1

    def up_to_mismatch(self) -> DraftTrace:
        """Return the trace without the rows that follow a first mismatch."""
        keep = self.fate_known()
        lengths = torch.minimum(self.lengths, self.accepted + 1)
        return replace(self, lengths=lengths, hidden=self.hidden[keep], features=self.features[keep])


def pack(trace: DraftTrace) -> dict[str, Tensor]:
    """Pack a trace as one sequence, the context first: what `PreVerifierModule` reads (Appendix D, Figure 5).

    A draft row attends to the context before its draft's start, the earlier rows of its own draft and itself.
    """
    size = len(trace.context)
    index, draft = trace.draft_index(), trace.draft_of_row()
    starts, rows = trace.starts[draft], len(index)
    mask = torch.zeros(size + rows, size + rows, dtype=torch.bool, device="cpu")
    mask[:size, :size] = _numbers(0, size).unsqueeze(1) >= _numbers(0, size)
    mask[size:, :size] = _numbers(0, size) < (starts - 1).unsqueeze(1)
    mask[size:, size:] = (draft.unsqueeze(1) == draft) & (index.unsqueeze(1) >= index)
    return {
        "hidden": torch.cat([trace.context.float(), trace.hidden.float()]),
        "features": torch.cat([trace.features.new_zeros(size, trace.features.shape[1]), trace.features]),
        "draft_index": torch.cat([index.new_zeros(size), index]),
        "position": torch.cat([_numbers(0, size), starts - 2 + index]),
        "mask": mask,
    }


def _numbers(start: int, stop: int) -> Tensor:
    """start, start + 1, .. stop - 1: int64 on the CPU, whatever the default device is."""
    return torch.arange(start, stop, dtype=torch.long, device="cpu")
