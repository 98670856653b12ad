"""The one KV cache that drafting and verification share: preallocated, written in place, rolled back by a number."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.model import LayerWindow


class KVCache:
    """Keys and values of every layer for up to `max_length` positions.

    keys: [layers, num_kv_heads, head_dim, max_length], as attention multiplies queries by them; in memory the last two are
    the other way round unless `model.transposed_keys`. values: [layers, num_kv_heads, max_length, head_dim].
    `length` says how many rows are valid in *all* layers; rows at or behind it are leftovers (of rejected drafts, say)
    that the next rows at those positions overwrite.
    """

    def __init__(self, model: LayerSkipModel, max_length: int) -> None:
        model.prepare(max_length)
        shape = (model.num_layers, model.num_kv_heads, max_length, model.head_dim)
        self.values = torch.empty(shape, dtype=model.dtype, device=model.device)
        if model.transposed_keys:
            shape = (*shape[:2], model.head_dim, max_length)
            self.keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        else:
            self.keys = torch.empty_like(self.values).mT
        self.max_length = max_length
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, whatever the length."""
        return 2 * self.values.numel() * self.values.element_size()

    def window(self, start: int, stop: int, position: int, end: int) -> Iterator[LayerWindow]:
        """Of layers [start, stop): the rows position .. end-1 to write, and keys and values of the positions before `end`.

        Per layer four views: new keys and new values, [end - position, num_kv_heads, head_dim]; keys
        [num_kv_heads, head_dim, end] and values [num_kv_heads, end, head_dim]. Made for all layers at once, since a slice
        costs as much as a small kernel.
        """
        keys, values = self.keys[start:stop, :, :, :end], self.values[start:stop, :, :end]
        new_keys = keys[..., position:].permute(0, 3, 1, 2)
        new_values = values[:, :, position:].transpose(1, 2)
        return zip(new_keys.unbind(0), new_values.unbind(0), keys.unbind(0), values.unbind(0))

    def roll_back(self, length: int) -> None:
        """Declare rows 0 .. length-1 valid in every layer. Copies nothing.

        Raises ValueError if the cache is too short for that.
        """
        if not 0 <= length <= self.max_length:
            raise ValueError(f"length must be in [0, {self.max_length}], got {length}")
        self.length = length
