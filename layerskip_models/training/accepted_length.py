"""Weights that make an exit's loss count what each token is worth for the length of an accepted draft.

An exit drafts token after token, and the first wrong one ends what is accepted. A token that follows a place where drafts
often end is seldom reached, and the tokens before a long run of easy ones decide whether all of those count.

Source: Wu et al. 2026, "D-PACE: Dynamic Position-Aware Cross-Entropy for Parallel Speculative Drafting", equations 3
to 9, section 5.2 ("cumulative-only") and appendix E (the same with KL to soft labels: pass the soft cross-entropy).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ARMS = ("uniform", "cumulative", "full")


def accepted_length_weights(losses: Tensor, valid: Tensor, *, arm: str, alpha: float, block: int) -> Tensor:
    """Weight of each token's loss, detached, with a mean of 1 over the valid rows of every sequence.

    losses: [batch, length], -log q of each row's label in nats, at least 0; the label of row t is token t + 1.
    valid: bool [batch, length]. A row that is False gets weight 0 and ends a draft: no draft starts at it or crosses
        it. Its loss is not read. Rows without a label belong here, and the last row of a document, before another one starts.
    arm: "uniform" is 1 everywhere. For the draft of `block` tokens that starts at row s, with
        q~ = (1 - alpha) exp(-loss) + alpha and P_m = q~_s q~_(s+1) ... q~_m, "cumulative" gives row j the weight P_j,
        which stands for the chance that row j is reached and accepted, and "full" (equation 8) gives it
        P_j + P_(j+1) + ... to the end of the draft: the gradient of the expected accepted length by log q_j.
    alpha: in [0, 1]. It keeps the products from vanishing; the loss itself stays unsmoothed.
    Returns [batch, length] in the type of `losses`. A sequence whose products are all 0 has equal weights.
    Raises ValueError for an unknown arm, alpha outside [0, 1] or a block below 1.

    Deviations from the paper. Its drafter writes whole blocks from chosen anchors. An exit drafts token by token, and a
    round may start at any row. So a row's weight is the sum over all drafts that contain it, one starting at every
    valid row, which is the gradient of the accepted length averaged over all starts. It has no noise, unlike blocks
    laid at an offset drawn per step, and it does not prefer a place in a block: alpha = 1 gives equal weights, but for
    the first and last rows of a document, which fewer drafts contain. The mean of 1 makes the arms comparable at one
    learning rate. It is taken per sequence, so that a sequence's weights do not depend on what shares the pass.
    """
    if arm not in ARMS:
        raise ValueError(f"arm must be one of {', '.join(ARMS)}, got {arm!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    with torch.no_grad():
        if arm == "uniform":
            return valid.to(losses.dtype)
        smoothed = (1 - alpha) * torch.exp(-losses.double()) + alpha
        weights = sum_over_starts(draft_weights(torch.where(valid, smoothed, 0.0), arm=arm, block=block))
        return mean_of_one(weights, valid).to(losses.dtype)


def draft_weights(smoothed: Tensor, *, arm: str, block: int) -> Tensor:
    """Weights of the rows of each draft, before they are summed: [batch, length, block]; entry [b, s, i] is row s + i's.

    smoothed: q~, [batch, length], 0 where a draft ends.
    """
    products = by_draft(smoothed, block).cumprod(-1)
    return products if arm == "cumulative" else products.flip(-1).cumsum(-1).flip(-1)


def by_draft(values: Tensor, block: int) -> Tensor:
    """Values of rows, [batch, length], for a draft from every row: [batch, length, block], 0 past the end."""
    return F.pad(values, (0, block - 1)).unfold(1, block, 1)


def mean_of_one(weights: Tensor, valid: Tensor) -> Tensor:
    """Weights [batch, length] with a mean of 1 over the valid rows of every sequence; equal ones where all are 0."""
    total = weights.sum(1, keepdim=True)
    count = valid.sum(1, keepdim=True)
    return torch.where(total > 0, weights * (count / total), valid.to(weights.dtype))


def sum_over_starts(weights: Tensor) -> Tensor:
    """[batch, start, place in the draft] -> [batch, row]: the sum over all drafts that contain the row."""
    length = weights.shape[1]
    total = torch.zeros_like(weights[:, :, 0])
    for place in range(min(weights.shape[2], length)):
        total[:, place:] += weights[:, : length - place, place]
    return total
