"""A model of which each process holds a part: each runs its own heads and its part of the MLP, and the parts are summed.

Hidden states are whole and have the same bits on every rank, so decisions that follow from them are the same everywhere.
Keys, values and everything inside attention and the MLP belong to one rank. On our own kernels half a layer is one call. A
rank's part is written where it is sent from, and the next call sums the parts in the order of ranks: nothing is copied, and a
row's numbers depend on no other row.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from layerskip_models.backends.operators import OperatorLayers
from layerskip_models.backends.protocol import Capture, LayerBackend, VocabularyBackend
from layerskip_models.choices import Choices, Detail
from layerskip_models.decoder_layer import DecoderLayer, Linear
from layerskip_models.kernels.native_layers import NativeLayers, portions
from layerskip_models.kernels.threads import num_threads
from layerskip_models.kv_cache import CacheRows
from layerskip_models.model import LayerSkipModel
from layerskip_models.norm import RMSNorm
from layerskip_models.parallel.collectives import Exchange, sum_in_place
from layerskip_models.parallel.ranks import SMALL, Ranks
from layerskip_models.parallel.shard_plan import Part, ShardPlan
from layerskip_models.parallel.vocabulary import choices_of_parts, numbers_of, whole_logits

_ATTENTION, _MLP, _NEITHER = range(3)  # `enum Half` of halves.h


class TensorParallelLayers:
    """`LayerBackend` on our own kernels. layers: this rank's part."""

    def __init__(self, layers: NativeLayers, ranks: Ranks) -> None:
        self.variant = layers.variant
        self._layers, self._ranks = layers, ranks

    def run(
        self, hidden: Tensor, start: int, stop: int, rows: CacheRows, rotary: Tensor, capture: Capture | None
    ) -> Tensor:
        """All ranks must make the same call. Raises RankError if another process ends."""
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
        """x: [rows, hidden], changed in place. seen: tensors that receive the output of each layer."""
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
    """Address and number of the parts, as C takes them."""
    return (None, 0) if parts is None else (parts.data_ptr(), parts.shape[0])


class _Sums:
    """Buffers for the parts of one pass.

    There are two, since other ranks may send the next parts while these are still being read. Few rows are received where
    they are read, and receiving starts before this rank's part is computed. For many rows all ranks compute the sum together.
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
        """The buffer for this rank's part."""
        if not self._exchanges:
            self._sum = torch.empty_like(self._sum)  # the previous one is still being read
            return self._sum[0]
        self._exchanges.reverse()
        started = perf_counter()
        self._exchanges[0].announce()
        self._ranks.waiting_seconds += perf_counter() - started
        return self._exchanges[0].own

    def end(self) -> Tensor:
        """The parts, [ranks, rows, hidden], or their sum, [1, rows, hidden]."""
        started = perf_counter()
        if self._exchanges:
            self._exchanges[0].complete()
            found = self._exchanges[0].parts
        else:
            sum_in_place(self._sum[0])
            found = self._sum
        self._ranks.waiting_seconds += perf_counter() - started
        return found


class SummedLinear:
    """A matrix of which each rank has some columns: the product is the sum over ranks. See `Linear`."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks
        self.num_bytes = part.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, columns of this rank]. Returns [rows, out]."""
        return self._ranks.add_up(self._part(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual is added once, after the sum."""
        return self._ranks.add_up(self._part(x)) + residual


class JointNorm(RMSNorm):
    """A norm over all heads of a row, of which each rank has some. x: [.., width of this rank]; returns the same shape."""

    def __init__(self, part: RMSNorm, whole: int, ranks: Ranks) -> None:
        super().__init__(part.weight, part.eps, live=True)
        self._whole, self._ranks = whole, ranks

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = self._ranks.add_up(wide.square().sum(dim=-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self._whole + self.eps)).to(x.dtype).mul_(self.weight)


class ShardedVocabulary:
    """A vocabulary of which each rank has some tokens, in embedding and head. part: those of this rank."""

    def __init__(self, part: VocabularyBackend, plan: ShardPlan, ranks: Ranks, device: torch.device) -> None:
        self._part, self._ranks, self._device = part, ranks, device
        self.plan, self._own = plan, plan.vocab
        self.size = int(plan.config.vocab_size)
        self._sizes = [Part.of(self.size, rank, ranks.size).size for rank in range(ranks.size)]

    def embed(self, tokens: Tensor) -> Tensor:
        """Each row comes from the rank that has its token."""
        own = tokens - self._own.start
        there = (own >= 0) & (own < self._own.size)
        rows = self._part.embed(own.clamp(0, self._own.size - 1))
        return self._ranks.add_up(rows * there.unsqueeze(1))

    def embed_one(self, token: int) -> Tensor:
        return self.embed(torch.tensor([token], device=self._device))

    def logits(self, head: Linear, hidden: Tensor) -> Tensor:
        return whole_logits(self._part.logits(head, hidden), max(self._sizes), self._ranks, self._sizes)

    def choices(self, head: Linear, hidden: Tensor, detail: Detail) -> Choices:
        own = numbers_of(self._part.choices(head, hidden, detail), self._own.start)
        return choices_of_parts(self._ranks.gather(own), self.size)


def tensor_parallel(part: LayerSkipModel, plan: ShardPlan, ranks: Ranks) -> LayerSkipModel:
    """The whole model, of which this rank holds `part`. All ranks must call the same methods in the same order.

    num_heads and num_kv_heads stay those of the part, so a KV cache is as large as the part; vocab_size and config become
    those of the whole model.
    """

    def divided(backend: LayerBackend, operators: OperatorLayers) -> tuple[LayerBackend, OperatorLayers]:
        summed = operators.with_layers([_summed(layer, plan, ranks) for layer in operators.layers])
        if isinstance(backend, NativeLayers) and not plan.joint_norms:
            return TensorParallelLayers(backend, ranks), summed
        return summed, summed

    backend, operators = divided(part.backend, part.operators)
    vocabulary = ShardedVocabulary(part.vocabulary, plan, ranks, part.device)
    return part.with_backend(backend, vocabulary, operators=operators, ranks=ranks, config=plan.config, remake=divided)


def _summed(layer: DecoderLayer, plan: ShardPlan, ranks: Ranks) -> DecoderLayer:
    query_norm, key_norm = layer.query_norm, layer.key_norm
    if plan.joint_norms and query_norm is not None and key_norm is not None:
        config: Any = plan.config
        query_norm = JointNorm(query_norm, config.num_attention_heads * plan.head_dim, ranks)
        key_norm = JointNorm(key_norm, config.num_key_value_heads * plan.head_dim, ranks)
    return replace(
        layer,
        output=SummedLinear(layer.output, ranks),
        down=SummedLinear(layer.down, ranks),
        query_norm=query_norm,
        key_norm=key_norm,
    )
