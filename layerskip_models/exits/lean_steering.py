"""Steering as drafts use it: the last verified row's states become one vector a round, and a bias for each exit that asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.exits.steering import SteeredAdapters


class LeanSteering:
    """What a model's steered exits share, in the model's dtype, on its device. It never changes.

    layers: after which the states that steer are taken, ascending.
    """

    def __init__(
        self, adapters: SteeredAdapters, exit_layers: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = adapters.config
        self.layers, self._eps = config.steering_layers, config.eps

        def matrix(weight: Tensor) -> Tensor:
            return weight.detach().to(device=device, dtype=dtype, copy=True)

        with torch.inference_mode(False), torch.no_grad():
            self._project = matrix(adapters.steering.project.weight)
            self._steer = {layer: matrix(adapters.at(layer).steer.weight) for layer in exit_layers}

    def of(self, states: Tensor) -> RoundSteering:
        """states: [depths, hidden], of the row that was verified last; or [rows, depths, hidden], for each row its own."""
        normed = F.rms_norm(states.float(), states.shape[-1:], None, self._eps).to(states.dtype)
        return RoundSteering(F.linear(normed.flatten(-2), self._project), self._steer)

    def rows_before(self, states: Tensor, before: Tensor | None = None) -> RoundSteering:
        """Steer consecutive rows, each by the row before it, as the first draft of a round is steered.

        states: [layers of the model, rows, hidden], as all layers put them out. before: the same of the row before them,
        [layers, hidden]; None if there is no such row: the first row is then steered by zeros.
        """
        slots = [layer - 1 for layer in self.layers]
        chosen = states[slots].transpose(0, 1)
        first = torch.zeros_like(chosen[:1]) if before is None else before[slots].unsqueeze(0)
        return self.of(torch.cat([first, chosen[:-1]]))

    def none(self) -> RoundSteering:
        """Return what zero states give: nothing is steered."""
        size = self._project.shape[1] // len(self.layers)
        return self.of(torch.zeros(len(self.layers), size, dtype=self._project.dtype, device=self._project.device))


class RoundSteering:
    """g of one round, [size], or one for each row, [rows, size]; and the bias that it gives an exit, computed once."""

    def __init__(self, vector: Tensor, steer: dict[int, Tensor]) -> None:
        self._vector, self._steer = vector, steer
        self._biases: dict[int, Tensor] = {}

    def bias(self, exit_layer: int) -> Tensor:
        """[rank] or [rows, rank], which is added to the adapter's U n. KeyError for an exit without a steered adapter."""
        found = self._biases.get(exit_layer)
        if found is None:
            found = self._biases[exit_layer] = F.linear(self._vector, self._steer[exit_layer])
        return found
