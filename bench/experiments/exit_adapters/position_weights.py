"""What the loss of a token weighs when adapters are fitted: D-PACE's weights, and those that its paper compares with.

Source: Wu et al. 2026, "D-PACE", sections 4.1, 5.2 and 5.4, appendix B. Two of its baselines are among D-PACE's own settings
here, since drafts start at every row (see `accepted_length_weights`): a decay by the place in a block gives every row the
same sum, so it is "uniform", but for the ends of documents; and the gradient of the accepted length itself
("accept-rate") has the weights of "full" with alpha 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.training.accepted_length import (
    ARMS,
    accepted_length_weights,
    by_draft,
    mean_of_one,
    sum_over_starts,
)
from selfspec.exits.fitting import Weights, in_runs, states_at
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.sequences import ExitSequence

OTHERS = ("continuation", "top3", "target")
_TOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """arm: one of D-PACE's, or of `OTHERS`. alpha: smoothing. block: draft length that weights count with."""

    arm: str
    alpha: float = 0.5
    block: int = 8

    @property
    def name(self) -> str:
        """As commands take it."""
        if self.block != 8:
            return f"{self.arm}:{self.alpha:g}:{self.block}"
        return self.arm if self.alpha == 0.5 else f"{self.arm}:{self.alpha:g}"


def parse_weighting(name: str) -> Weighting:
    """ARM[:ALPHA[:BLOCK]]. Raises ValueError for any other text."""
    arm, *numbers = name.split(":")
    try:
        if arm not in (*ARMS, *OTHERS) or len(numbers) > 2:
            raise ValueError
        alpha = float(numbers[0]) if numbers else 0.5
        block = int(numbers[1]) if len(numbers) == 2 else 8
        if not (0 <= alpha <= 1 and block >= 1):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"a weighting is ARM[:ALPHA[:BLOCK]] with one of {', '.join((*ARMS, *OTHERS))}, alpha in [0, 1] and a block of "
            f"at least 1, got {name!r}"
        ) from None
    return Weighting(arm=arm, alpha=alpha, block=block)


def other_weights(weighting: Weighting, head: FrozenHead, depths: Sequence[int]) -> Weights | None:
    """Weights of the arms that `train-exit` does not have; None for those that it has."""
    if weighting.arm not in OTHERS:
        return None

    def weigh(sequence: ExitSequence, rows: Tensor, output: Tensor, losses: Tensor) -> Tensor:
        runs = sequence.runs(rows)
        if weighting.arm == "continuation":
            return in_runs(losses, runs, _continuation(weighting))
        target, labels = _targets(sequence, rows, head, depths)
        if weighting.arm == "target":
            sure = -torch.log(target.clamp_min(torch.finfo(target.dtype).tiny))
            return in_runs(sure, runs, _full(weighting))
        among = torch.cat([_among(head.logits(output[part]), labels[part]) for part in head.chunks(len(labels))])
        return in_runs(among.to(losses.dtype), runs, _prefix_mask(weighting))

    return weigh


def _targets(sequence: ExitSequence, rows: Tensor, head: FrozenHead, depths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The model's probability of each row's label, [n], and the labels, int64 [n]: see `ExitFit`."""
    last = states_at(sequence, depths, depths[-1], rows)
    own, following = sequence.own[rows], sequence.labels[rows]
    found, labels = [], []
    for part in head.chunks(len(rows)):
        target = head.target(last[part])
        label = torch.where(own[part], following[part], target.tokens)
        found.append(target.probabilities.gather(-1, label.unsqueeze(-1)).squeeze(-1))
        labels.append(label)
    return torch.cat(found), torch.cat(labels)


def _among(logits: Tensor, labels: Tensor) -> Tensor:
    """bool [n]: whether the label is one of the exit's likeliest tokens."""
    return (logits.topk(_TOP, dim=-1).indices == labels.unsqueeze(-1)).any(dim=-1)


def _full(weighting: Weighting) -> Callable[[Tensor, Tensor], Tensor]:
    def weights(losses: Tensor, valid: Tensor) -> Tensor:
        return accepted_length_weights(losses, valid, arm="full", alpha=weighting.alpha, block=weighting.block)

    return weights


def _continuation(weighting: Weighting) -> Callable[[Tensor, Tensor], Tensor]:
    """f_j: 1, and what follows row j in its draft, supposing that j is accepted. losses, valid: [1, length]."""

    def weights(losses: Tensor, valid: Tensor) -> Tensor:
        smoothed = torch.where(valid, (1 - weighting.alpha) * torch.exp(-losses.double()) + weighting.alpha, 0.0)
        windows = by_draft(smoothed, weighting.block)
        values = [torch.ones_like(windows[..., 0])]
        for place in reversed(range(1, weighting.block)):
            values.append(1 + windows[..., place] * values[-1])
        return mean_of_one(sum_over_starts(torch.stack(values[::-1], dim=-1) * _reached(valid, weighting)), valid)

    return weights


def _prefix_mask(weighting: Weighting) -> Callable[[Tensor, Tensor], Tensor]:
    """1 for a row of a draft whose earlier rows all have their label among the exit's likeliest. among: [1, length]."""

    def weights(among: Tensor, valid: Tensor) -> Tensor:
        windows = by_draft(torch.where(valid, among, 0.0).double(), weighting.block)
        before = F.pad(windows[..., :-1], (1, 0), value=1.0).cumprod(-1)
        return mean_of_one(sum_over_starts(before * _reached(valid, weighting)), valid)

    return weights


def _reached(valid: Tensor, weighting: Weighting) -> Tensor:
    """1 for the rows of each draft up to where a document ends, else 0: [1, length, block]."""
    return by_draft(valid.double(), weighting.block).cumprod(-1)
