"""Which rows steer which while adapters are fitted and judged, and what exits say then.

Source: SD2 (Berdoz et al.), appendix A.4: the row that steers is a random number of positions before the row that is steered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip_models.exits.adapter import ExitAdapters
from selfspec.exits.hidden_state_dataset import ExitSequence


def rows_before(sequence: ExitSequence, rows: Tensor, distance: Tensor) -> Tensor:
    """Find the rows `distance` positions before these in the same text, as indices; -1 for a row that is missing.

    rows, distance: int64 [n].
    """
    keys = sequence.keys()
    wanted = keys[rows] - distance
    found = torch.searchsorted(keys, wanted)
    found.clamp_(max=len(sequence) - 1)
    there = (keys[found] == wanted) & (distance <= sequence.positions[rows])
    return torch.where(there, found, -1)


def exit_outputs(
    adapters: ExitAdapters, sequence: ExitSequence, depths: Sequence[int], rows: Tensor, distance: Tensor
) -> list[Tensor]:
    """Compute what replaces each exit's states at these rows, float32 [n, hidden] for each exit.

    depths: of the sequence's states. distance: int64 [n], how far before each row the row is that steers it, if one does;
    where there is no such row, nothing steers.
    """
    steering = None
    if adapters.steering is not None:
        before = rows_before(sequence, rows, distance)
        columns = [depths.index(layer) for layer in adapters.steering.layers]
        states = sequence.states[before.clamp_min(0)][:, columns].float()
        steering = adapters.steering(states * (before >= 0).view(-1, 1, 1))
    return [
        adapters.at(layer)(sequence.states[rows, depths.index(layer)].float(), steering)
        for layer in adapters.exit_layers
    ]
