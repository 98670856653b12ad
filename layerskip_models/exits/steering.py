"""Steered adapters as they are trained: exits that see more of the row that was verified last than its token.

    y = x + D (silu(G n) * (U n + S g)),  g = P [n_1; n_2; n_3]

n_i: the states of the last verified row after a few layers, each divided by its root mean square. g is one for all drafts of
a round and shared by all exits, so it is computed once a round. S is zero at the start, so an untrained adapter changes
nothing. The j-th draft of a round is steered by the row j positions before its own, so in training a row is steered by a row
1 to `FARTHEST` positions before it, at random (`selfspec.exits.steered_rows`).

Source: SD2 (Berdoz et al.), appendix A.4. There the bias goes into every MLP of a drafter of its own. Here drafts share the
model's layers and its KV cache, so it goes into the adapter alone; and states are normalised, since a layer that is wider in
scale would drown the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip_models.exits.adapter import STEERED, AdapterConfig, ExitAdapter, ExitAdapters

FARTHEST = 8
"""How far before a draft's row the row that steers it may be, as far as steering is trained."""
STEERING_SIZE = 64
"""The width of g where nobody names another."""


def steering_layers(num_layers: int) -> tuple[int, ...]:
    """After which layers states are taken: 3, L/2 and L-2, as in SD2; ascending, fewer in a model of few layers."""
    wanted = (3, num_layers // 2, num_layers - 2)
    return tuple(sorted({min(max(layer, 1), num_layers) for layer in wanted}))


def make_adapters(config: AdapterConfig) -> ExitAdapters:
    """Untrained adapters of the form that the configuration names."""
    return SteeredAdapters(config) if config.form == STEERED else ExitAdapters(config)


class SteeredAdapter(ExitAdapter):
    """One exit's adapter, steered by `Steering`."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config)
        self.steer = nn.Linear(config.steering_size, config.rank, bias=False)
        nn.init.zeros_(self.steer.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """ValueError: what it says depends on what steers it; call `steered`."""
        raise ValueError("a steered adapter says nothing by itself: call steered, with what steers it")

    def steered(self, hidden: Tensor, steering: Tensor) -> Tensor:
        """hidden: [..., hidden], of the exit. steering: [..., steering_size]. Returns the shape of hidden."""
        normed = F.rms_norm(hidden, (self.config.hidden_size,), None, self.config.eps)
        return self.add_gated(hidden, normed, self.up(normed) + self.steer(steering))


class Steering(nn.Module):
    """P, the projection of the states that steer, shared by all exits.

    As wide as the hidden states it begins as the sum of the normalised states, as SD2 begins; else with random numbers.
    """

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.eps = config.eps
        size, hidden, depths = config.steering_size, config.hidden_size, len(config.steering_layers)
        self.project = nn.Linear(depths * hidden, size, bias=False)
        if size == hidden:
            with torch.no_grad():
                self.project.weight.copy_(torch.eye(hidden).repeat(1, depths))

    def forward(self, states: Tensor) -> Tensor:
        """states: [..., depths, hidden], ascending depths. Returns [..., steering_size]; of zeros, zeros."""
        normed = F.rms_norm(states, states.shape[-1:], None, self.eps)
        projected: Tensor = self.project(normed.flatten(-2))
        return projected


class SteeredAdapters(ExitAdapters):
    """Adapters that share the projection of the states that steer them."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config)
        self.steering = Steering(config)

    def make_adapter(self) -> ExitAdapter:
        return SteeredAdapter(self.config)

    def at(self, exit_layer: int) -> SteeredAdapter:
        found = super().at(exit_layer)
        assert isinstance(found, SteeredAdapter)
        return found
