"""The same layers with every place on the device: nothing in a pass depends on a Python number that changes.

What a CUDA graph captures is replayed as it is, so a position, a length or a row number must not be baked into it. Here
positions are a tensor: rotary rows are gathered by it, keys and values are written by it, and a mask made from it hides
what lies behind. Attention reads the first `span` positions, which is fixed per capture; callers choose the span from a few
sizes. The layers themselves are `LayerSkipModel.run_windows`, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from layerskip_models.model import LayerSkipModel, LayerWindow


class PlacedRows:
    """Keys or values of one layer; what is copied into it lands at positions that only the device knows."""

    __slots__ = ("_buffer", "_dim", "_order", "_positions")

    def __init__(self, buffer: Tensor, dim: int, order: tuple[int, int, int], positions: Tensor) -> None:
        self._buffer, self._dim, self._order, self._positions = buffer, dim, order, positions

    def copy_(self, rows: Tensor, /) -> None:
        """Write rows [rows, num_kv_heads, head_dim] at their positions."""
        self._buffer.index_copy_(self._dim, self._positions, rows.permute(self._order))


class StaticForward:
    """Runs layers of a model on one KV cache, all of whose memory stays where it is.

    keys: [layers, num_kv_heads, head_dim, max_length]; values: [layers, num_kv_heads, max_length, head_dim]. Every position
    must hold finite numbers: what is masked is still multiplied by 0.
    """

    def __init__(self, model: LayerSkipModel, keys: Tensor, values: Tensor) -> None:
        self.model = model
        self.max_length = values.shape[2]
        self._keys, self._values = keys, values
        self._rotary = model.rotary  # this very table, kept: a graph would not see a longer one that takes its place
        self._places = torch.arange(self.max_length, dtype=torch.long, device=values.device)

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        positions: Tensor,
        span: int,
        capture: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run layers [start, stop) over rows at these positions; otherwise as `LayerSkipModel.run_layers`.

        positions: int64 [rows], all below `span`; equal rows may share a position. Row i attends to 0 .. positions[i].
        span: how many positions attention looks at, at most `max_length`.
        """
        model = self.model
        rotary = self._rotary.index_select(0, positions)
        group = model.num_heads // model.num_kv_heads
        hidden_places = self._places[:span] > positions.unsqueeze(1)  # [rows, span]
        mask = torch.zeros(hidden_places.shape, dtype=model.dtype, device=model.device)
        mask = mask.masked_fill_(hidden_places, -torch.inf).unsqueeze(1).expand(-1, group, -1).reshape(-1, span)
        return model.run_windows(
            hidden, start, self._windows(start, stop, positions, span), rotary, model.attend_grouped, mask, capture
        )

    def _windows(self, start: int, stop: int, positions: Tensor, span: int) -> Iterator[LayerWindow]:
        for layer in range(start, stop):
            keys, values = self._keys[layer], self._values[layer]
            yield (
                PlacedRows(keys, 2, (1, 2, 0), positions),
                PlacedRows(values, 1, (1, 0, 2), positions),
                keys[..., :span],
                values[:, :span],
            )
