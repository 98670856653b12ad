"""The same layers with every place on the device: nothing in a pass depends on a Python number that changes.

What a CUDA graph captures is replayed as it is, so a position, a length or a row number must not be baked into it. Here
positions are a tensor: rotary rows are gathered by it, and keys and values are written by it. Attention takes the length
from the device where it can (`paged_attention`). Elsewhere it reads the first `span` positions, which is fixed per capture,
and a mask made from the positions hides what lies after a row; callers choose the span from a few sizes. The layers are run
by `LayerSkipModel.walk`, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from layerskip_models.attention import attend_grouped, repeat_rows, unseen
from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel
from selfspec.engine.runners.cuda_graph.paged_attention import PAGE, PagedAttention, Pages, attends_by_pages, write_rows


class StaticAttention:
    """Attention with masks, for rows at positions that only the device knows (`layerskip_models.attention.Attention`).

    positions: int64 [rows], all below `span`. windows: the sliding window of every layer.
    masks: for each of them, [rows * group, span].
    """

    def __init__(
        self,
        cache: KVCache,
        positions: Tensor,
        span: int,
        rotary: Tensor,
        windows: Sequence[int | None],
        masks: Mapping[int | None, Tensor],
    ) -> None:
        self._cache, self._positions, self._span = cache, positions, span
        self.rotary, self._windows, self._masks = rotary, windows, masks

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        write_rows(self._cache, layer, self._positions, key, value)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        mask = self._masks[self._windows[layer]]
        seen = keys[..., : self._span].to(query.dtype), values[:, : self._span].to(query.dtype)
        return attend_grouped(query, *seen, mask)


class StaticForward:
    """Runs layers of a model on one KV cache, all of whose memory stays where it is, and which does not count these rows.

    Every position of the cache must hold finite numbers: what is masked is still multiplied by 0.
    paged: whether attention takes the length from the device, and `run` no span: where the operator can be used and the cache
    is made of whole pages.
    """

    def __init__(self, model: LayerSkipModel, cache: KVCache) -> None:
        self.model, self._cache = model, cache
        self._rotary = model.rotary  # this very table, kept: a graph would not see a longer one that takes its place
        self.paged = cache.max_length % PAGE == 0 and attends_by_pages(model)
        self._pages = Pages.of(cache) if self.paged else None
        self._places = torch.arange(cache.max_length, dtype=torch.long, device=model.device)

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        positions: Tensor,
        span: int | None,
        capture: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run layers [start, stop) over rows at these positions; otherwise as `LayerSkipModel.run_layers`.

        positions: int64 [rows], all below `span`; equal rows may share a position. Row i attends to 0 .. positions[i].
        span: how many positions attention looks at, at most the cache's length. None, where `paged` only: as many as there
        are; each position is then one more than the one before.
        """
        model = self.model
        windows = model.sliding_windows
        if span is None:
            assert self._pages is not None
            rotary = self._rotary.index_select(0, positions)
            by_pages = PagedAttention(self._cache, self._pages, positions, rotary, windows)
            return model.walk(hidden, start, stop, by_pages, capture)
        masks = {window: self._mask(positions, span, window) for window in set(windows[start:stop])}
        rotary = self._rotary.index_select(0, positions)
        attention = StaticAttention(self._cache, positions, span, rotary, windows, masks)
        return model.walk(hidden, start, stop, attention, capture)

    def _mask(self, positions: Tensor, span: int, window: int | None) -> Tensor:
        """Make the mask of the positions that a row does not attend to, [rows * group, span]."""
        model = self.model
        hidden_places = unseen(positions, self._places[:span], window)  # [rows, span]
        mask = torch.zeros(hidden_places.shape, dtype=model.dtype, device=model.device)
        mask = mask.masked_fill_(hidden_places, -torch.inf)
        return repeat_rows(mask, model.num_heads // model.num_kv_heads)
