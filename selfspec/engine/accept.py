"""Which drafts are accepted, and what comes after them: pure functions of p, q, tokens and uniform numbers.

p is the target's distribution, q the draft's, both after the same logits processors. Row i of both belongs to draft i + 1,
and sees the i drafts before it. There is no epsilon anywhere.

Source: block verification (Sun et al., ICLR 2025, Algorithm 2). It never accepts fewer drafts than speculative sampling
(Leviathan et al. 2023, Chen et al. 2023), and is the same for a single draft. The rule in words, for k drafts:

1. r_0 = 1, and r_i = min(1, r_{i-1} p(d_i) / q(d_i)). This is the chance that at least the first i drafts are accepted, given
   what they are. A draft that the target likes more than the drafter did makes up for an earlier one that it likes less.
2. If u_k < r_k, all are accepted. The next token comes from the target's last row.
3. Else i goes down from k - 1. Row i leaves the weights max(0, r_i p - q), whose sum is R_i. If u_i < R_i / (R_i + 1 - r_i),
   or if i is 0, then the first i drafts are accepted. The next token comes from these weights.

A draft ends at its first row without a distribution (NaN, or a processor that raised), as if nothing had been drafted from
that row: plain decoding, if it comes there, fails there. Random numbers: one for each draft, in order and before anything is
decided, then one for the token that follows. Rounding: r and R are float64, of float32 numbers, and uniform numbers have 24
bits. A single draft is accepted exactly when u q < p; other chances are off by about as much as p and q themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def accept_copied(p: Tensor, drafts: Tensor, uniforms: Sequence[float]) -> tuple[int, Tensor]:
    """Judge drafts that were fixed before anything was drawn: q is one-hot, so each is accepted with its p, one by one.

    Block verification has the same chances here, but needs all rows. p: [m+1 or more, vocab], up to the first rejected draft;
    the rest as of `accept_sampled`, which it also returns.
    """
    index = drafts[: p.shape[0]].unsqueeze(-1)
    for accepted, share in enumerate(p[: len(index)].gather(-1, index).squeeze(-1).tolist()):
        if not uniforms[accepted] < share:
            weights = p[accepted].index_fill(0, index[accepted], 0.0)
            return accepted, weights if float(weights.sum()) > 0 else p[accepted]  # as in `accept_sampled`
    return len(drafts), p[len(drafts)]


def reach(p: Tensor, q: Tensor, drafts: Tensor) -> list[float]:
    """Compute r_0, r_1, .., up to the end of the draft, or to a draft that the target cannot say (0).

    p: [k+1, vocab]; rows behind such a draft, or behind one without a distribution, may be missing. q: [k, vocab]. drafts:
    int64 [k], each drawn from its row of q.
    """
    reached, index = [1.0], drafts[: p.shape[0]].unsqueeze(-1)
    shares = torch.cat([rows[: len(index)].gather(-1, index) for rows in (p, q)], dim=-1)
    for p_draft, q_draft in shares.tolist():  # one copy from a device
        if reached[-1] == 0 or p_draft != p_draft:
            break
        reached.append(min(reached[-1] * p_draft / q_draft, 1.0))
    return reached


def accept_sampled(p: Tensor, q: Tensor, reached: Sequence[float], uniforms: Sequence[float]) -> tuple[int, Tensor]:
    """Judge a block of drafts: how many are accepted, and the weights to draw the next token from.

    p, q: as of `reach`, which gave `reached`. uniforms: [k], in [0, 1).
    Returns (m, weights [vocab]), unnormalised; NaN if the row has no distribution.
    """
    last = len(reached) - 1
    if last == 0 or uniforms[last - 1] < reached[last]:
        return last, p[last]
    weights = residual(p[:last], q[:last], reached[:last])
    left = weights.sum(dim=-1, dtype=torch.float64).tolist()
    for index in range(last - 1, 0, -1):
        if uniforms[index - 1] * (left[index] + 1 - reached[index]) < left[index]:
            return index, weights[index]
    # Where rounding leaves nothing, p and q are equal but for the last bit, and p is right to within that bit.
    return 0, weights[0] if left[0] > 0 else p[0]


def residual(p: Tensor, q: Tensor, reached: Sequence[float]) -> Tensor:
    """Weights max(0, r p - q) of what a rejection leaves, unnormalised, [rows, vocab], as p and q."""
    return (p * torch.tensor(reached, dtype=p.dtype, device=p.device).unsqueeze(-1) - q).clamp_(min=0.0)


def acceptance_probabilities(p: Tensor, q: Tensor, reached: Sequence[float] = ()) -> Tensor:
    """Chance that a token drawn from each row is accepted, whichever it is, given that those before it are, [rows].

    That is the sum over tokens of min(p, q / r), the mean of what the tokens drawn from q would come to. p, q: [rows, vocab].
    reached: r by row; 1 by default. 0 where a row has no distribution.
    """
    if min(reached, default=1.0) < 1:
        q = q / torch.tensor(reached, dtype=q.dtype, device=q.device).unsqueeze(-1)
    return torch.minimum(p, q).sum(dim=-1).nan_to_num_(0.0)
