"""What the head says of some rows when nobody needs the logits themselves: the token that wins, and how sure the row is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from layerskip_models.transfer import read_rows

Detail = Literal["token", "confidence", "all"]
"""How much to compute: the winning token; also its probability; also the margin and the entropy."""
_LOGITS = 1 << 22  # numbers of logits that exist at a time: 16 MB


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Figures of the unfiltered distribution at temperature 1, row by row.

    tokens: int64 [rows], the argmax; the first of equal ones. numbers: float32 [1, 2 or 4, rows], as much as was asked for:
    logits, confidences, margins (the tokens' logits less the second largest ones) and entropies.
    """

    tokens: Tensor
    numbers: Tensor

    @property
    def logits(self) -> Tensor:
        """Logits of the tokens, [rows]. NaN where any logit of the row is NaN."""
        return self.numbers[0]

    @property
    def confidences(self) -> Tensor:
        """Probabilities of the tokens, [rows]."""
        return self.numbers[1]

    @property
    def entropies(self) -> Tensor:
        """In nats, [rows]."""
        return self.numbers[3]

    def read(self) -> tuple[list[int], list[list[float]]]:
        """Tokens, and each kind of number, on the host."""
        return read_rows(self.tokens, self.numbers)

    def outputs(self) -> list[HeadOutput]:
        """Tokens and figures row by row, in one copy from the device."""
        tokens, numbers = self.read()
        return [HeadOutput(*row) for row in zip(tokens, *numbers)]


class HeadOutput(NamedTuple):
    """What the head says of one row; see `Choices`. NaN where it was not asked for."""

    token: int
    logit: float
    confidence: float = math.nan
    margin: float = math.nan
    entropy: float = math.nan


def choices_of(logits: Tensor, detail: Detail) -> Choices:
    """By PyTorch's operators. logits: float32 [rows, vocab]."""
    best = logits.max(dim=-1)
    numbers = [best.values]
    if detail != "token":
        p = logits.softmax(dim=-1)
        numbers.append(p.amax(dim=-1))
        if detail == "all":
            top = logits.topk(2, dim=-1).values
            numbers += [top[:, 0] - top[:, 1], torch.special.entr(p).sum(dim=-1)]
    return Choices(best.indices, torch.stack(numbers))


def choices_in_pieces(hidden: Tensor, vocab_size: int, logits: Callable[[Tensor], Tensor], detail: Detail) -> Choices:
    """Do the same for rows whose logits would be too many at once.

    hidden: [rows, hidden]; logits: makes them of such rows.
    """
    rows = max(_LOGITS // vocab_size, 1)
    if hidden.shape[0] <= rows:
        return choices_of(logits(hidden), detail)
    pieces = [choices_of(logits(piece), detail) for piece in hidden.split(rows)]
    return Choices(torch.cat([p.tokens for p in pieces]), torch.cat([p.numbers for p in pieces], dim=1))


def empty_choices(rows: int, detail: Detail) -> Choices:
    """To be filled by a kernel, which writes either one row of numbers or all four."""
    numbers = torch.empty(1 if detail == "token" else 4, rows, dtype=torch.float32, device="cpu")
    return Choices(torch.empty(rows, dtype=torch.int64, device="cpu"), numbers)
