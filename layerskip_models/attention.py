"""Attention as one small protocol, and its implementation by PyTorch's operators.

A pass's rows may belong to several texts: matrices see all of them, attention sees each text's own cache. On our own kernels
whole layers are one call, attention included (`kernels.native_layers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from layerskip_models.kv_cache import CacheRows, LayerWindow

_FEW_ROWS = 16  # up to here attention in three kernels is faster on a CPU


class Attention(Protocol):
    """What a pass's rows attend to, called for each layer in order. rotary: the rotary table's rows at their positions."""

    rotary: Tensor

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the rows' keys and values, and attend: query [rows, heads, head_dim], key and value [rows, kv_heads,
        head_dim] -> [rows, heads * head_dim]. The query may be overwritten."""
        ...


class OperatorAttention:
    """By PyTorch's operators, text by text: a row attends to its own text up to itself.

    rows: of each text, in the order of the pass's rows. Raises ValueError where they do not fit into a cache.
    sliding_windows: of layers [start, stop), how many positions a row attends to, its own among them; None for all.
    rotary: the model's table. dtype: of the arithmetic, whatever keys and values are kept in. unfused: whether a few rows
    take three kernels of their own. groups_rows: whether no fused kernel takes both a mask and grouped heads, as on CUDA.
    """

    def __init__(
        self,
        rows: CacheRows,
        start: int,
        stop: int,
        *,
        rotary: Tensor,
        heads: int,
        dtype: torch.dtype,
        sliding_windows: Sequence[int | None],
        unfused: bool,
        groups_rows: bool,
    ) -> None:
        self._start, self._sizes = start, [number for _, number in rows]
        positions = [cache.position(start, stop) for cache, _ in rows]
        tables = [rotary[position : position + number] for position, number in zip(positions, self._sizes)]
        self.rotary = tables[0] if len(tables) == 1 else torch.cat(tables)
        self._texts = [
            _TextAttention(
                list(cache.windows(start, stop, number)), position, number, heads,
                dtype=dtype, sliding_windows=sliding_windows, unfused=unfused, groups_rows=groups_rows,
            )
            for (cache, number), position in zip(rows, positions)
        ]  # fmt: skip

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        index = layer - self._start
        if len(self._texts) == 1:
            return self._texts[0].attend(index, query, key, value)
        parts = zip(self._texts, query.split(self._sizes), key.split(self._sizes), value.split(self._sizes))
        return torch.cat([text.attend(index, *rows) for text, *rows in parts])


class _Sight(NamedTuple):
    """What the rows of a text see in a layer.

    first: the position that keys begin with. mask: added to scores, as `attend` wants it; None where nothing is hidden but
    what a causal kernel hides. grouped: whether query heads of a group are rows of one product.
    """

    first: int
    mask: Tensor | None
    grouped: bool


def aligned(columns: int) -> int:
    """Columns of memory for a mask: a multiple of 8, or fused attention on CUDA copies the mask in every layer."""
    return -(-columns // 8) * 8


def repeat_rows(mask: Tensor, times: int) -> Tensor:
    """Each row repeated `times` times: [rows * times, columns], in rows of memory of a multiple of 8 columns."""
    rows, columns = mask.shape
    repeated = torch.empty(rows, times, aligned(columns), dtype=mask.dtype, device=mask.device)[..., :columns]
    return repeated.copy_(mask.unsqueeze(1)).flatten(0, 1)


def unseen(positions: Tensor, places: Tensor, window: int | None) -> Tensor:
    """Return which places rows do not attend to: bool [rows, places].

    positions, places: int64 [rows] and [places], both in the text. window: as `OperatorAttention`'s sliding windows.
    """
    own = positions.unsqueeze(1)
    behind = places > own
    return behind if window is None else behind | (places <= own - window)


class _TextAttention:
    """Attention of one text's rows in all layers of a pass."""

    def __init__(
        self,
        windows: list[LayerWindow],
        position: int,
        rows: int,
        heads: int,
        *,
        dtype: torch.dtype,
        sliding_windows: Sequence[int | None],
        unfused: bool,
        groups_rows: bool,
    ) -> None:
        self._windows = windows
        values = windows[0][3]
        kv_heads, _, dim = values.shape
        # Scores of a few rows are small next to the layer's keys; those of many rows would not be.
        self._few = unfused and (rows == 1 or (rows <= _FEW_ROWS and rows * heads <= kv_heads * dim))
        self._heads, self._group_rows = heads, groups_rows and heads != kv_heads
        device = values.device
        sights = {window: self._sight(position, rows, window, values, dtype) for window in set(sliding_windows)}
        self._sights = [sights[window] for window in sliding_windows]
        if self._few:
            # A tensor without dimensions: multiplying by a Python number makes one every time, which costs twice as much.
            self._scale = torch.tensor(dim**-0.5, dtype=dtype, device=device)

    def _sight(self, position: int, rows: int, window: int | None, values: Tensor, dtype: torch.dtype) -> _Sight:
        """Return what rows from `position` on see in layers of this window. values: of one layer, up to these rows."""
        (_, end, _), device = values.shape, values.device
        first = 0 if window is None else max(0, position - window + 1)
        mask: Tensor | None = None
        if rows > 1 and window is not None and end > window:
            mask = torch.zeros(rows, aligned(end - first), dtype=dtype, device=device)[:, : end - first]
            places = torch.arange(first, end, device=device)
            mask.masked_fill_(unseen(places[position - first :], places, window), -torch.inf)
        elif rows > 1 and self._few:
            mask = torch.full((rows, rows), -torch.inf, dtype=dtype, device=device).triu_(1)
        elif rows > 1 and position > 0:
            mask = torch.full((rows, aligned(end)), -torch.inf, dtype=dtype, device=device).triu_(position + 1)[:, :end]
        if mask is not None and self._few:
            mask = mask.unsqueeze(1)
        elif mask is not None and self._group_rows:
            group = self._heads // values.shape[0]
            return _Sight(first, repeat_rows(mask, group), grouped=True)
        return _Sight(first, mask, grouped=rows == 1)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `Attention`; index: of the layer within the pass."""
        new_keys, new_values, keys, values = self._windows[index]
        new_keys.copy_(key)
        new_values.copy_(value)
        first, mask, grouped = self._sights[index]
        if first:
            keys, values = keys[..., first:], values[:, first:]
        keys, values = keys.to(query.dtype), values.to(query.dtype)  # nothing where they are kept in it
        if self._few:
            return self._attend_few(query, keys, values, mask)
        if grouped:
            return attend_grouped(query, keys, values, mask)
        keys = keys.mT
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != keys.shape[0],
        )
        return attended.squeeze(0).transpose(0, 1).flatten(1)

    def _attend_few(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend in three kernels for a few rows: on CPUs, `scaled_dot_product_attention` spends more on its own views.

        query: is overwritten. mask: [rows, 1, n], is added to the last n positions.
        """
        rows, heads, dim = query.shape
        kv_heads, end = keys.shape[0], keys.shape[2]
        group = heads // kv_heads
        if rows == 1 or kv_heads == 1:  # the query heads of a group see the same keys: they are rows of one product
            queries = query.reshape(kv_heads, rows * group, dim)
        else:
            queries = query.view(rows, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, rows * group, dim)
        scores = torch.bmm(queries.mul_(self._scale), keys)  # [kv_heads, rows * group, end]
        if mask is not None:
            scores.view(kv_heads, rows, group, end)[..., end - mask.shape[2] :].add_(mask)
        attended = torch.bmm(scores.softmax(dim=-1), values)  # [kv_heads, rows * group, head_dim]
        if rows == 1 or kv_heads == 1:
            return attended.view(rows, heads * dim)
        return attended.view(kv_heads, rows, group, dim).transpose(0, 1).reshape(rows, heads * dim)


def attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Fused attention in which the query heads of a group are rows of one product, since they see the same keys.

    query: [rows, heads, head_dim]. keys: [kv_heads, head_dim, positions]. values: [kv_heads, positions, head_dim].
    mask: [rows * group, positions]; None for one row. Returns [rows, heads * head_dim].
    """
    rows, kv_heads = query.shape[0], keys.shape[0]
    grouped = rearrange(query, "rows (kv group) dim -> 1 kv (rows group) dim", kv=kv_heads)
    attended = F.scaled_dot_product_attention(grouped, keys.mT.unsqueeze(0), values.unsqueeze(0), attn_mask=mask)
    return rearrange(attended, "1 kv (rows group) dim -> rows (kv group dim)", rows=rows)
