"""The same layers with every place on the device: nothing in a pass depends on a Python number that changes.

What a CUDA graph captures is replayed as it is, so a position, a length or a row number must not be baked into it. Here
positions are a tensor: rotary rows are gathered by it, keys and values are written by it, and a mask made from it hides
what lies behind. Attention reads the first `span` positions, which is fixed per capture; callers choose the span from a few
sizes. The layers themselves are `LayerSkipModel.run_windows`, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from einops import rearrange, repeat
from torch import Tensor

from layerskip_models.model import LayerSkipModel, LayerWindow


class PlacedRows:
    """Keys or values of one layer; what is copied into it lands at positions that only the device knows."""

    __slots__ = ("_buffer", "_layout", "_positions", "_positions_dim")

    def __init__(self, buffer: Tensor, layout: str, positions: Tensor) -> None:
        """layout: the buffer's dimensions by name, with "position" for the one that rows are placed along."""
        self._buffer, self._layout, self._positions = buffer, layout, positions
        self._positions_dim = layout.split().index("position")

    def copy_(self, rows: Tensor, /) -> None:
        """Write rows [rows, num_kv_heads, head_dim] at their positions."""
        placed = rearrange(rows, f"position head dim -> {self._layout}")
        self._buffer.index_copy_(self._positions_dim, self._positions, placed)


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
        mask = repeat(mask.masked_fill_(hidden_places, -torch.inf), "rows span -> (rows group) span", group=group)
        return model.run_windows(
            hidden, start, self._windows(start, stop, positions, span), rotary, model.attend_grouped, mask, capture
        )

    def _windows(self, start: int, stop: int, positions: Tensor, span: int) -> Iterator[LayerWindow]:
        for layer in range(start, stop):
            keys, values = self._keys[layer], self._values[layer]
            yield (
                PlacedRows(keys, "head dim position", positions),
                PlacedRows(values, "head position dim", positions),
                keys[..., :span],
                values[:, :span],
            )
