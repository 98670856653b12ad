"""Which drafts are accepted, and what comes after them: pure functions of p, q, tokens and uniform numbers.

Source: Leviathan et al. 2023 and Chen et al. 2023. p is the target's distribution, q the draft's, both after the same
logits processors. There is no epsilon anywhere, so the output law is p up to the rounding of p and q themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def accept_greedy(drafts: Sequence[int], target: Sequence[int]) -> int:
    """Length of the longest prefix in which every draft is the target's own choice.

    drafts: d_1..d_k. target: argmax of p_1..p_{k+1}.
    """
    for accepted, (draft, choice) in enumerate(zip(drafts, target)):
        if draft != choice:
            return accepted
    return len(drafts)


def accept_sampled(
    p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor, left: Callable[[Tensor, Tensor], Tensor] | None = None
) -> tuple[int, Tensor]:
    """Speculative sampling: how many drafts are accepted, and the weights to draw the next token from.

    p: [k+1, vocab]; q: [k, vocab]; drafts: int64 [k], each drawn from its row of q; uniforms: [k] in [0, 1).
    Draft i is accepted when u_i * q_i(d_i) < p_i(d_i), that is with probability min(1, p/q); a draft with p = 0 never is.
    left: computes what a rejection leaves; `residual` by default.
    Returns (m, weights [vocab]): `residual(p_m, q_m)` after a rejection, p_{k+1} if all were accepted.
    """
    num_drafts = drafts.shape[0]
    if num_drafts == 0:
        return 0, p[0]
    index = drafts.unsqueeze(-1)
    shares = [p[:num_drafts].gather(-1, index), q[:num_drafts].gather(-1, index), uniforms.unsqueeze(-1)]
    num_accepted = 0
    for p_draft, q_draft, uniform in torch.cat(shares, dim=-1).tolist():  # one copy from a device
        if not uniform * q_draft < p_draft:
            return num_accepted, (left or residual)(p[num_accepted], q[num_accepted])
        num_accepted += 1
    return num_accepted, p[num_drafts]


def acceptance_probabilities(p: Tensor, q: Tensor, drafts: Tensor) -> Tensor:
    """min(1, p_i(d_i) / q_i(d_i)) for each draft, [k]; arguments as in `accept_sampled`."""
    index = drafts.unsqueeze(-1)
    p_draft = p[: drafts.shape[0]].gather(-1, index).squeeze(-1)
    q_draft = q[: drafts.shape[0]].gather(-1, index).squeeze(-1)
    return (p_draft / q_draft).clamp_(max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights max(0, p - q) of what a rejection leaves, unnormalised, [vocab].

    Where rounding leaves nothing (p and q equal but for the last bit) the answer is p itself, which is then right to
    within that bit.
    """
    weights = (p - q).clamp_(min=0.0)
    return torch.where(weights.sum() > 0, weights, p)
