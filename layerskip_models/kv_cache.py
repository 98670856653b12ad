"""The KV cache of one text: preallocated, written in place by passes, rolled back by a number."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Protocol

import torch
from torch import Tensor

from layerskip_models.kernels.pages import LARGE, expect_large_pages

LayerWindow = tuple[Tensor, Tensor, Tensor, Tensor]
"""New keys and new values to write, [rows, num_kv_heads, head_dim]; then all keys, [num_kv_heads, head_dim, end], and values,
[num_kv_heads, end, head_dim]."""


class CacheShape(Protocol):
    """What a cache must know of its model (`LayerSkipModel`)."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def prepare(self, max_length: int) -> None: ...


class KVCache:
    """Keys and values of every layer for up to `max_length` positions of one text, and how many rows each layer holds.

    values: [layers, num_kv_heads, max_length, head_dim]. keys: [layers, num_kv_heads, head_dim, max_length], as attention
    multiplies queries by them; in memory they are like the values. Both have the model's `kv_dtype`, to which rows are
    rounded once, as they are written. With layers on several devices each device has a part, and these two are not there.

    A pass through layers [start, stop) writes its rows after those that these layers hold, and the cache counts them: so
    nobody has to say at which position rows are. Drafting fills only the first layers; what rounds reject is forgotten with
    `roll_back`, and the next rows overwrite it.

    A looped model has layers of its own in the cache for each loop. `loop` gives one loop's part, for passes whose rows are
    in different loops. loop_index: which loop this is a part of; 0 for a whole cache.
    """

    loop_index = 0

    def __init__(self, model: CacheShape, max_length: int) -> None:
        model.prepare(max_length)
        devices = getattr(model, "layer_devices", None) or (model.device,) * model.num_layers
        self._parts: list[tuple[Tensor, Tensor]] = []  # values and keys of layers that follow each other on a device
        for device, layers in groupby(devices):
            shape = (len(list(layers)), model.num_kv_heads, max_length, model.head_dim)
            values = torch.empty(shape, dtype=model.kv_dtype, device=device)
            keys = torch.empty_like(values)
            self._parts.append((values, keys.mT))
            # Where a head's rows take whole pages: in a shorter cache they would be memory that no row fills.
            if values.is_cpu and max_length * model.head_dim * model.kv_dtype.itemsize >= LARGE:
                for memory in (keys, values):
                    expect_large_pages(memory)
        if len(self._parts) == 1:
            ((self.values, self.keys),) = self._parts
        self.max_length = max_length
        self.described: object = None  # what our kernels know of this memory, once they have checked it
        self._rows = [0] * model.num_layers  # never another list: the parts of loops count in it, too
        self._layers = slice(0, model.num_layers)  # those of `_rows` that are this cache's
        self._loops: list[KVCache | None] = [None] * getattr(model, "num_loops", 1)

    def loop(self, index: int) -> KVCache:
        """Return one loop's part as a cache of its own, whose layers count from 0; the same object each time.

        Both see one memory and the same numbers of rows. `roll_back`, `declare` and `take` of the part are about it alone.
        Raises ValueError if there is no such loop.
        """
        if not 0 <= index < len(self._loops):
            raise ValueError(f"loop must be in [0, {len(self._loops) - 1}], got {index}")
        part = self._loops[index]
        if part is None:
            size = len(self._rows) // len(self._loops)
            first, end = index * size, (index + 1) * size
            part = copy.copy(self)
            part._layers, part._loops, part.loop_index, part.described = slice(first, end), [], index, None
            part._parts, begin = [], 0
            for values, keys in self._parts:
                within = slice(max(first - begin, 0), max(end - begin, 0))
                if len(values[within]):
                    part._parts.append((values[within], keys[within]))
                begin += len(values)
            if len(part._parts) == 1:
                ((part.values, part.keys),) = part._parts
            self._loops[index] = part
        return part

    @property
    def length(self) -> int:
        """Rows that every layer holds."""
        return min(self._rows[self._layers])

    @property
    def memory(self) -> list[Tensor]:
        """All of it."""
        return [stored for part in self._parts for stored in part]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, whatever the length."""
        return sum(stored.numel() * stored.element_size() for stored in self.memory)

    def position(self, start: int, stop: int) -> int:
        """Return where the next row of layers [start, stop) belongs: the number of rows they hold.

        Raises ValueError if there are no such layers, or if they do not hold equally many.
        """
        own = self._rows[self._layers]
        rows = own[start:stop]
        if not rows or len(rows) != stop - start or rows.count(rows[0]) != len(rows):
            raise ValueError(f"layers [{start}, {stop}) of {len(own)} hold different numbers of rows: {rows}")
        return rows[0]

    def room(self, start: int, stop: int, rows: int) -> int:
        """Return the same, after a check that `rows` more fit. Raises ValueError if they do not."""
        position = self.position(start, stop)
        if position + rows > self.max_length:
            raise ValueError(f"{rows} rows from position {position} on do not fit into a cache of {self.max_length}")
        return position

    def extend(self, start: int, stop: int, rows: int) -> None:
        """Layers [start, stop) have been given `rows` more."""
        first = self._layers.start
        self._rows[first + start : first + stop] = [self._rows[first + start] + rows] * (stop - start)

    def windows(self, start: int, stop: int, rows: int) -> Iterator[LayerWindow]:
        """For layers [start, stop): where their next rows are written, and keys and values up to and with these.

        Made for all layers at once, since a slice costs as much as a small kernel.
        """
        position = self.room(start, stop, rows)
        end = position + rows
        found: list[Iterator[LayerWindow]] = []
        first = 0
        for values, keys in self._parts:
            last = first + values.shape[0]
            if first < stop and start < last:
                found.append(_windows(values, keys, max(start - first, 0), min(stop, last) - first, position, end))
            first = last
        return chain.from_iterable(found)

    def roll_back(self, length: int) -> None:
        """Forget all rows but the first `length`. Copies nothing.

        Raises ValueError if a layer holds fewer.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], the rows that every layer holds, got {length}")
        self._hold(length)

    def take(self, source: KVCache, length: int) -> None:
        """Copy the first `length` rows of another cache of the same model, and hold these rows alone.

        Raises ValueError if they do not fit.
        """
        self.declare(length)
        with torch.inference_mode():  # either cache may have been made in it
            for (values, keys), (their_values, their_keys) in zip(self._parts, source._parts):
                values[:, :, :length] = their_values[:, :, :length]
                keys[..., :length] = their_keys[..., :length]

    def declare(self, length: int) -> None:
        """Every layer holds exactly these rows: written by somebody else than `run_layers`."""
        if not 0 <= length <= self.max_length:
            raise ValueError(f"length must be in [0, {self.max_length}], got {length}")
        self._hold(length)

    def _hold(self, length: int) -> None:
        self._rows[self._layers] = [length] * len(self._rows[self._layers])


def _windows(values: Tensor, keys: Tensor, start: int, stop: int, position: int, end: int) -> Iterator[LayerWindow]:
    keys, values = keys[start:stop, :, :, :end], values[start:stop, :, :end]
    new_keys = keys[..., position:].permute(0, 3, 1, 2)
    new_values = values[:, :, position:].transpose(1, 2)
    return zip(new_keys.unbind(0), new_values.unbind(0), keys.unbind(0), values.unbind(0))


CacheRows = Sequence[tuple[KVCache, int]]
"""The rows of a pass: each cache with the number of rows of its text, one text after another."""


def cache_rows(cache: KVCache | CacheRows, rows: int) -> CacheRows:
    """All of a pass's rows, where it is given one cache for all of them."""
    return ((cache, rows),) if isinstance(cache, KVCache) else cache
