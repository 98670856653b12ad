"""Weights that make an exit's loss count what each token is worth for the length of an accepted draft.

Source: Wu et al. 2026, "D-PACE: Dynamic Position-Aware Cross-Entropy for Parallel Speculative Drafting", equations 3 to 9
and section 5.2 ("cumulative-only"). Deviation: there drafts start at chosen anchors. An exit may start one at any row, so a
row's weight is the sum over all drafts that contain it: the gradient of the accepted length averaged over all starts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ARMS = ("uniform", "cumulative", "full")
ALPHA, BLOCK = 0.5, 8  # as in the paper, where alpha from .3 to .7 hardly matters


@torch.no_grad()
def accepted_length_weights(
    losses: Tensor, valid: Tensor, *, arm: str, alpha: float = ALPHA, block: int = BLOCK
) -> Tensor:
    """Return each row's weight, [batch, length], of mean 1 over the valid rows of a sequence; equal where all would be 0.

    losses: [batch, length], -log q of each row's label. valid: bool, the same shape; other rows get 0 and end a draft.
    arm: "uniform" is 1. With q~ = (1 - alpha) q + alpha and P_m = q~_s .. q~_m, for the draft of `block` rows from row s,
        "cumulative" gives row j P_j, and "full" (equation 8) P_j + P_(j+1) + ..., the gradient of its accepted length.
    """
    if arm == "uniform":
        return valid.to(losses.dtype)
    smoothed = torch.where(valid, (1 - alpha) * torch.exp(-losses.double()) + alpha, 0.0)
    drafts = F.pad(smoothed, (0, block - 1)).unfold(1, block, 1).cumprod(-1)  # [batch, start, place]
    if arm == "full":
        drafts = drafts.flip(-1).cumsum(-1).flip(-1)
    total = torch.zeros_like(smoothed)
    for place in range(min(block, losses.shape[1])):
        total[:, place:] += drafts[:, : losses.shape[1] - place, place]
    weight, count = total.sum(1, keepdim=True), valid.sum(1, keepdim=True)
    return torch.where(weight > 0, total * (count / weight), valid.double()).to(losses.dtype)
