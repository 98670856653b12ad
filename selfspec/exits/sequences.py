"""What adapters are fitted to: rows of texts with their hidden states, several short texts in one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_STRIDE = 1 << 32
UNSCORED = -1


@dataclass(frozen=True, slots=True, eq=False)
class ExitSequence:
    """Rows of one text or of several, in order; rows that nobody needs may be left out.

    states: [rows, depths, hidden]. labels: int64 [rows], the text's next token, or UNSCORED where no loss is taken.
    positions: int64 [rows], in the row's own text. texts: int64 [rows], ascending: the number of the row's text.
    own: bool [rows], True where the model wrote the text itself.
    """

    states: Tensor
    labels: Tensor
    positions: Tensor
    texts: Tensor
    own: Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    @property
    def scored(self) -> Tensor:
        """bool [rows]."""
        return self.labels != UNSCORED

    def scored_rows(self) -> Tensor:
        """int64 [n], ascending."""
        return self.scored.nonzero().flatten()

    def keys(self) -> Tensor:
        """int64 [rows], ascending: text and position as one number. Neighbouring tokens of a text differ by 1."""
        return self.texts * _STRIDE + self.positions

    def runs(self, rows: Tensor) -> Tensor:
        """int64 [n]: numbers, from 0, of the stretches without gaps that these rows (int64 [n], ascending) form."""
        keys = self.keys()[rows]
        return torch.cat([keys.new_zeros(1), (keys.diff() != 1).long()])[: len(rows)].cumsum(0)

    def to(self, device: torch.device) -> ExitSequence:
        return ExitSequence(*(getattr(self, name).to(device) for name in ExitSequence.__slots__))


def join(parts: Sequence[ExitSequence]) -> ExitSequence:
    """Several sequences as one; their texts stay apart."""
    texts, first = [], 0
    for part in parts:
        texts.append(part.texts - part.texts[0] + first)
        first = int(texts[-1][-1]) + 1
    return ExitSequence(
        states=torch.cat([part.states for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        texts=torch.cat(texts),
        own=torch.cat([part.own for part in parts]),
    )
