"""A head whose vocabulary is split over ranks: each looks at its own part, and a few numbers a row make one choice of them.

The token that wins is the largest of the ranks' largest; nobody needs anybody's logits for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.choices import Choices
from layerskip_models.parallel.ranks import Ranks


def numbers_of(choices: Choices, first_token: int) -> Tensor:
    """What a rank tells the others: float64 [2, 3 or 5, rows].

    The token, its logit; then the logarithm of the sum of exponentials of the part's logits; then the second largest logit
    and the entropy within the part. first_token: of the part.
    """
    wide = choices.numbers.double()
    told = [choices.tokens.double() + first_token, wide[0]]
    if len(wide) > 1:
        told.append(wide[0] - wide[1].log())  # p = exp(logit - log sum)
    if len(wide) > 2:
        told += [wide[0] - wide[2], wide[3]]
    return torch.stack(told)


def choices_of_parts(parts: Tensor, vocab_size: int) -> Choices:
    """What the whole vocabulary's rows come to, from `numbers_of` of every rank: [ranks, numbers, rows].

    No host waits in it. With one number a row (the token) logits are exact; probabilities, margins and entropies are put
    together in float64.
    """
    tokens, logits = parts[:, 0], parts[:, 1]
    best = logits.amax(dim=0)  # NaN, if any is
    at_best = torch.where(logits == best, tokens, vocab_size).amin(dim=0)  # of equal ones the first
    token = torch.where(best.isnan(), 0.0, at_best)
    numbers = [best]
    if parts.shape[1] > 2:
        sums = parts[:, 2]
        total = sums.logsumexp(dim=0)
        numbers.append((best - total).exp())
    if parts.shape[1] > 3:
        seconds, entropies = parts[:, 3], parts[:, 4]
        contenders = torch.cat([torch.where(tokens == token, -torch.inf, logits), seconds]).amax(dim=0)
        numbers.append(best - contenders)
        shares = (sums - total).exp()
        between = torch.special.entr(shares)
        numbers.append((shares * entropies + between).sum(dim=0))
    return Choices(token.long(), torch.stack(numbers).float())


def whole_logits(part: Tensor, widest: int, ranks: Ranks, sizes: list[int]) -> Tensor:
    """All ranks' logits, side by side. part: [rows, own vocabulary]; sizes: of the parts. Returns [rows, vocab]."""
    padded = part if part.shape[1] == widest else F.pad(part, (0, widest - part.shape[1]))
    found = ranks.gather(padded)
    return torch.cat([found[rank, :, :size] for rank, size in enumerate(sizes)], dim=1)
