"""Steered adapters: exits that see more of the row that was verified last than its token.

    y = x + D (silu(G n) * (U n + S g)),  g = P [n_1; n_2; n_3]

n_i: the states of the last verified row after a few layers, each divided by its root mean square. g is one for all drafts of
a round and shared by all exits. S is zero at the start, so an untrained adapter changes nothing. g = 0 steers nothing. The
j-th draft of a round is steered by the row j positions before its own, so in training a row is steered by a row 1 to
`FARTHEST` positions before it, at random (`selfspec.exits.steered_rows`).

Source: SD2 (Berdoz et al.), appendix A.4. There the bias goes into every MLP of a drafter of its own. Here drafts share the
model's layers and its KV cache, so it goes into the adapter alone; and states are normalised, since a layer that is wider in
scale would drown the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from layerskip_models.exits.adapter import AdapterConfig

FARTHEST = 8
"""How far before a draft's row the row that steers it may be, as far as steering is trained."""
STEERING_SIZE = 64
"""The width of g where nobody names another."""


def steering_layers(num_layers: int) -> tuple[int, ...]:
    """After which layers states are taken: 3, L/2 and L-2, as in SD2; ascending, fewer in a model of few layers."""
    wanted = (3, num_layers // 2, num_layers - 2)
    return tuple(sorted({min(max(layer, 1), num_layers) for layer in wanted}))


class Steering(nn.Module):
    """P, the projection of the states that steer, shared by all exits. layers: after which they are taken, ascending.

    As wide as the hidden states it begins as the sum of the normalised states, as SD2 begins; else with random numbers.
    """

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.layers, self.eps = config.steering_layers, config.eps
        size, hidden, depths = config.steering_size, config.hidden_size, len(self.layers)
        self.project = nn.Linear(depths * hidden, size, bias=False)
        if size == hidden:
            with torch.no_grad():
                self.project.weight.copy_(torch.eye(hidden).repeat(1, depths))

    def forward(self, states: Tensor) -> Tensor:
        """states: [..., depths, hidden], ascending depths. Returns g, [..., steering_size]; of zeros, zeros."""
        normed = F.rms_norm(states.float(), states.shape[-1:], None, self.eps).to(states.dtype)
        projected: Tensor = self.project(normed.flatten(-2))
        return projected

    def rows_before(self, states: Tensor, before: Tensor | None = None) -> Tensor:
        """Steer consecutive rows, each by the row before it, as the first draft of a round is steered: g, [rows, size].

        states: [layers of the model, rows, hidden], as all layers put them out. before: the same of the row before them,
        [layers, hidden]; None if there is no such row: nothing steers the first row then.
        """
        slots = [layer - 1 for layer in self.layers]
        chosen = states[slots].transpose(0, 1)
        first = torch.zeros_like(chosen[:1]) if before is None else before[slots].unsqueeze(0)
        return self(torch.cat([first, chosen[:-1]]))
