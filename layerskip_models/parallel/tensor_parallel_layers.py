"""Layers of which this process has a part, on our own kernels: half a layer in one call, and between two the parts of all.

A part is written where it is sent from, and what arrives is added up by the next call, in the order of ranks: nothing is
copied, and a row's numbers depend on no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof
from time import perf_counter

import torch
from torch import Tensor

from layerskip_models.kernels.native_layers import NativeLayers, portions
from layerskip_models.kernels.threads import num_threads
from layerskip_models.kv_cache import CacheRows
from layerskip_models.parallel.collectives import Exchange, sum_in_place
from layerskip_models.parallel.ranks import SMALL, Ranks

_ATTENTION, _MLP, _NEITHER = range(3)  # `enum Half` of halves.h


class TensorParallelLayers:
    """What `NativeLayers` is for whole layers. layers: of this process's part."""

    def __init__(self, layers: NativeLayers, ranks: Ranks) -> None:
        self.variant = layers.variant
        self._layers, self._ranks = layers, ranks

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rows: CacheRows,
        rotary: Tensor,
        capture: Callable[[int, Tensor], None] | None,
    ) -> Tensor:
        """As `NativeLayers.run`; all ranks must call it alike. Raises RankError where another process ends."""
        self._layers.check_rows(hidden, start, stop, rows, rotary)
        if start == stop:
            return hidden
        x = hidden.clone(memory_format=torch.contiguous_format)
        seen = [] if capture is None else [torch.empty_like(x) for _ in range(stop - start)]
        done = 0
        for part in portions(rows):
            count = sum(number for _, number in part)
            positions = [cache.position(start, stop) for cache, _ in part]
            with self._ranks.told():
                self._walk(x[done : done + count], start, stop, part, positions, rotary, [to[done:] for to in seen])
            for cache, number in part:
                cache.extend(start, stop, number)
            done += count
        if capture is not None:
            for index, states in enumerate(seen):
                capture(start + index + 1, states)
        return x

    def _walk(
        self,
        x: Tensor,
        start: int,
        stop: int,
        rows: CacheRows,
        positions: Sequence[int],
        rotary: Tensor,
        seen: Sequence[Tensor],
    ) -> None:
        """x: [rows, hidden], in place. seen: get what comes out of each layer."""
        space = self._layers.workspace()
        space.reserve(len(x))
        spans, step = space.describe(rows, positions, rotary), space.step
        step.x = x.data_ptr()
        sums, address, threads = _Sums(self._ranks, x), addressof(step), num_threads()
        parts: Tensor | None = None
        for layer in range(start, stop):
            step.first = layer
            for half in (_ATTENTION, _MLP):
                own = sums.begin()
                step.outputs = own.data_ptr()
                job = self._layers.run_half(address, half, *_described(parts), threads)
                if job:
                    space.keep(job, rows, x, spans, rotary, own, parts)
                if seen and half == _ATTENTION and layer > start:
                    seen[layer - start - 1][: len(x)] = x
                parts = sums.end()
        step.first = stop
        job = self._layers.run_half(address, _NEITHER, *_described(parts), threads)
        space.keep(job, rows, x, spans, rotary, parts)
        if seen:
            seen[-1][: len(x)] = x


def _described(parts: Tensor | None) -> tuple[int | None, int]:
    """For C: where they are, and how many."""
    return (None, 0) if parts is None else (parts.data_ptr(), parts.shape[0])


class _Sums:
    """Room for one pass's parts: two of them, since others may send the next ones while these are still read.

    Few rows are received where they are read, and announced before the own part is computed. Of many rows the sum is made by
    all ranks together.
    """

    def __init__(self, ranks: Ranks, x: Tensor) -> None:
        self._ranks = ranks
        self._exchanges: list[Exchange] = []
        self._sum = x.new_empty(0)
        if x.numel() * x.element_size() <= SMALL:
            self._exchanges = [Exchange(x.new_empty(ranks.size, *x.shape)) for _ in range(2)]
        else:
            self._sum = x.new_empty(1, *x.shape)

    def begin(self) -> Tensor:
        """Where the own part goes."""
        if not self._exchanges:
            self._sum = torch.empty_like(self._sum)  # the one before is still to be read
            return self._sum[0]
        self._exchanges.reverse()
        started = perf_counter()
        self._exchanges[0].announce()
        self._ranks.waiting_seconds += perf_counter() - started
        return self._exchanges[0].own

    def end(self) -> Tensor:
        """[ranks, rows, hidden], or one of them that is the sum."""
        started = perf_counter()
        if self._exchanges:
            self._exchanges[0].complete()
            found = self._exchanges[0].parts
        else:
            sum_in_place(self._sum[0])
            found = self._sum
        self._ranks.waiting_seconds += perf_counter() - started
        return found
