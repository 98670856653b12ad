"""The one KV cache that drafting and verification share: preallocated, written in place, rolled back by a number."""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel


class KVCache:
    """Keys and values of every layer for up to `max_length` positions.

    rows[l]: [max_length, 2 * num_kv_heads, head_dim], keys first; `LayerSkipModel.run_layers` writes rows at their
    positions. keys[l], values[l]: the same memory as [1, num_kv_heads, max_length, head_dim], as attention reads it.
    `length` says how many rows are valid in *all* layers; rows at or behind it are leftovers (of rejected drafts, say)
    that the next rows at those positions overwrite.
    """

    def __init__(self, model: LayerSkipModel, max_length: int) -> None:
        model.prepare(max_length)
        shape = (model.num_layers, max_length, 2 * model.num_kv_heads, model.head_dim)
        self._storage = torch.empty(shape, dtype=model.dtype, device=model.device)
        by_head = self._storage.transpose(1, 2).unsqueeze(1)
        self.rows: list[Tensor] = list(self._storage.unbind(0))
        self.keys: list[Tensor] = list(by_head[:, :, : model.num_kv_heads].unbind(0))
        self.values: list[Tensor] = list(by_head[:, :, model.num_kv_heads :].unbind(0))
        self.max_length = max_length
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, whatever the length."""
        return self._storage.numel() * self._storage.element_size()

    def roll_back(self, length: int) -> None:
        """Declare rows 0 .. length-1 valid in every layer. Copies nothing.

        Raises ValueError if the cache is too short for that.
        """
        if not 0 <= length <= self.max_length:
            raise ValueError(f"length must be in [0, {self.max_length}], got {length}")
        self.length = length
