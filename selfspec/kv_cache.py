"""The one KV cache that drafting and verification share: preallocated, written in place, rolled back by a number."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel


class KVCache:
    """Keys and values of every layer for up to `max_length` positions.

    rows[l]: [max_length, 2 * num_kv_heads, head_dim], keys first. `LayerSkipModel.run_layers` asks for a `window`: where to
    write its rows, and the same memory as attention reads it.
    `length` says how many rows are valid in *all* layers; rows at or behind it are leftovers (of rejected drafts, say)
    that the next rows at those positions overwrite.
    """

    def __init__(self, model: LayerSkipModel, max_length: int) -> None:
        model.prepare(max_length)
        shape = (model.num_layers, max_length, 2 * model.num_kv_heads, model.head_dim)
        self._storage = torch.empty(shape, dtype=model.dtype, device=model.device)
        by_head = self._storage.transpose(1, 2)
        self.rows: list[Tensor] = list(self._storage.unbind(0))
        self._keys = by_head[:, : model.num_kv_heads]  # [layers, kv_heads, max_length, head_dim]
        self._values = by_head[:, model.num_kv_heads :]
        self.max_length = max_length
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, whatever the length."""
        return self._storage.numel() * self._storage.element_size()

    def window(
        self, start: int, stop: int, position: int, end: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Of layers [start, stop): the rows position .. end-1 to write, and keys and values of the positions before `end`.

        Views: [end - position, 2 * num_kv_heads, head_dim] and twice [num_kv_heads, end, head_dim], a tuple over layers each.
        One call for all layers, since a slice costs as much as a small kernel.
        """
        return (
            self._storage[start:stop, position:end].unbind(0),
            self._keys[start:stop, :, :end].unbind(0),
            self._values[start:stop, :, :end].unbind(0),
        )

    def roll_back(self, length: int) -> None:
        """Declare rows 0 .. length-1 valid in every layer. Copies nothing.

        Raises ValueError if the cache is too short for that.
        """
        if not 0 <= length <= self.max_length:
            raise ValueError(f"length must be in [0, {self.max_length}], got {length}")
        self.length = length
