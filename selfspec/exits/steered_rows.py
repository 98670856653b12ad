"""Which rows steer which while adapters are fitted and judged, and what exits say then.

Source: SD2 (Berdoz et al.), appendix A.4: the row that steers is a random number of positions before the row that is steered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.steering import FARTHEST, SteeredAdapter, SteeredAdapters
from selfspec.exits.sequences import ExitSequence


def rows_before(sequence: ExitSequence, rows: Tensor, distance: Tensor) -> Tensor:
    """Indices of the rows `distance` positions before these in the same text; -1 where there is none.

    rows, distance: int64 [n].
    """
    keys = sequence.keys()
    wanted = keys[rows] - distance
    found = torch.searchsorted(keys, wanted)
    found.clamp_(max=len(sequence) - 1)
    there = (keys[found] == wanted) & (distance <= sequence.positions[rows])
    return torch.where(there, found, -1)


def steering_of(
    adapters: SteeredAdapters, sequence: ExitSequence, depths: Sequence[int], rows: Tensor, distance: Tensor
) -> Tensor:
    """g of the rows `distance` (int64 [n]) before these, [n, steering_size]; of zeros where there is no such row."""
    found = rows_before(sequence, rows, distance)
    columns = [depths.index(layer) for layer in adapters.config.steering_layers]
    states = sequence.states[found.clamp_min(0)][:, columns].float()
    projected: Tensor = adapters.steering(states * (found >= 0).view(-1, 1, 1))
    return projected


def exit_outputs(
    adapters: ExitAdapters, sequence: ExitSequence, depths: Sequence[int], rows: Tensor, distance: Tensor
) -> list[Tensor]:
    """What replaces each exit's states at these rows, float32 [n, hidden] for each exit.

    depths: of the sequence's states. distance: int64 [n], how far before each row the row is that steers it, if one does.
    """
    steering = None
    if isinstance(adapters, SteeredAdapters):
        steering = steering_of(adapters, sequence, depths, rows, distance)
    found = []
    for layer in adapters.exit_layers:
        hidden = sequence.states[rows, depths.index(layer)].float()
        adapter = adapters.at(layer)
        if isinstance(adapter, SteeredAdapter):
            assert steering is not None
            found.append(adapter.steered(hidden, steering))
        else:
            found.append(adapter(hidden))
    return found


def drawn_distances(rows: Tensor, draw: np.random.Generator) -> Tensor:
    """int64 [n]: for each row a distance of 1 to `FARTHEST`, at random."""
    return torch.from_numpy(draw.integers(1, FARTHEST + 1, len(rows))).to(rows.device)


def distances_in_turn(rows: Tensor) -> Tensor:
    """int64 [n]: 1, 2, .. `FARTHEST` and again, so that figures are a mean over the places in a draft, without chance."""
    return torch.arange(len(rows), device=rows.device) % FARTHEST + 1
