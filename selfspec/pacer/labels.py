"""Training data of Pacer's pre-verifier: draft traces -> labels, one packed sequence per response with its mask; metrics.

Knows traces only: neither the model that drafted them nor the network that learns from them.
Source: Pacer (Zhang et al. 2025), section 3.3 and Appendix D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import check_exit_layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrace:
    """One response at one exit layer: the text's exit hidden states, and drafts from several of its positions.

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

    def __post_init__(self) -> None:
        check_exit_layer(self.exit_layer, self.exit_layer + 1)
        rows = int(self.lengths.sum())
        if not len(self.hidden) == len(self.features) == rows or len(self.starts) != len(self.lengths):
            raise ValueError(f"the trace has {len(self.hidden)} rows, its lengths add up to {rows}")

    def draft_index(self) -> Tensor:
        """The number of each row in its draft, from 1: int64 [rows]."""
        return torch.cat([_numbers(1, length + 1) for length in self.lengths.tolist()])

    def draft_of_row(self) -> Tensor:
        """Which draft each row belongs to: int64 [rows]."""
        return _numbers(0, len(self.lengths)).repeat_interleave(self.lengths)

    def labels(self) -> Tensor:
        """1 for the tokens before the draft's first mismatch, 0 from there on: float32 [rows]."""
        return (self.draft_index() <= self.accepted[self.draft_of_row()]).float()

    def fate_known(self) -> Tensor:
        """Rows up to and including the first mismatch, whose own acceptance verification decides: bool [rows]."""
        return self.draft_index() <= self.accepted[self.draft_of_row()] + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A response's context and all its drafts as one sequence.

    hidden [rows, hidden], features [rows, F], draft_index and position int64 [rows] (0 and the row's place in the text for
    context), mask bool [rows, rows], labels float32 [rows] and scored bool [rows] (context rows are not).
    """

    exit_layer: int
    hidden: Tensor
    features: Tensor
    draft_index: Tensor
    position: Tensor
    mask: Tensor
    labels: Tensor
    scored: Tensor


def pack(trace: DraftTrace, *, scope: str = "full", block: int = 4) -> Packed:
    """Pack a trace (Appendix D, Figure 5).

    A draft row attends to the context before its draft's start, the earlier rows of its own draft and itself: all of that
    with scope "full", only its own draft with "draft", only its own block of `block` rows with "block".
    """
    size = len(trace.context)
    index, draft = trace.draft_index(), trace.draft_of_row()
    starts = trace.starts[draft]
    rows = len(index)
    own = (draft.unsqueeze(1) == draft) & (index.unsqueeze(1) >= index)
    if scope == "block":
        number = (index - 1) // block
        own &= number.unsqueeze(1) == number
    context = _numbers(0, size).expand(rows, -1) < (starts - 1).unsqueeze(1)
    if scope != "full":
        context = torch.zeros_like(context)
    mask = torch.zeros(size + rows, size + rows, dtype=torch.bool, device="cpu")
    mask[:size, :size] = torch.ones(size, size, dtype=torch.bool, device="cpu").tril()
    mask[size:, :size], mask[size:, size:] = context, own
    no_features = torch.zeros(size, trace.features.shape[1], dtype=torch.float32, device="cpu")
    return Packed(
        exit_layer=trace.exit_layer,
        hidden=torch.cat([trace.context, trace.hidden]).float(),
        features=torch.cat([no_features, trace.features]),
        draft_index=torch.cat([torch.zeros(size, dtype=torch.long, device="cpu"), index]),
        position=torch.cat([_numbers(0, size), starts - 2 + index]),
        mask=mask,
        labels=torch.cat([torch.zeros(size, dtype=torch.float32, device="cpu"), trace.labels()]),
        scored=torch.cat(
            [torch.zeros(size, dtype=torch.bool, device="cpu"), torch.ones(rows, dtype=torch.bool, device="cpu")]
        ),
    )


def _numbers(start: int, stop: int) -> Tensor:
    """start, start + 1, .. stop - 1: int64 on the CPU."""
    return torch.arange(start, stop, dtype=torch.long, device="cpu")


def cut(trace: DraftTrace, lengths: Tensor) -> DraftTrace:
    """The trace with draft i no longer than lengths[i]."""
    lengths = torch.minimum(trace.lengths, lengths)
    keep = trace.draft_index() <= lengths[trace.draft_of_row()]
    return DraftTrace(
        exit_layer=trace.exit_layer,
        context=trace.context,
        starts=trace.starts,
        lengths=lengths,
        accepted=torch.minimum(trace.accepted, lengths),
        hidden=trace.hidden[keep],
        features=trace.features[keep],
    )


def behind_mismatch(trace: DraftTrace, rows: int) -> DraftTrace:
    """The trace with at most `rows` rows of a draft behind its first mismatch."""
    return cut(trace, trace.accepted + 1 + rows)
