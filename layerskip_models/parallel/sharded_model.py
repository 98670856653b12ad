"""A model of which this process holds a part: the same forward pass, with sums over ranks where parts meet.

Hidden states are whole and the same bits on every rank, so whatever decides by them decides alike. Keys, values and what lies
within attention and the MLP are the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models.choices import Choices, Detail, choices_in_pieces
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kernels.threads import OneTeam
from layerskip_models.kv_cache import CacheRows, KVCache, cache_rows
from layerskip_models.linear import Linear
from layerskip_models.model import DecoderLayer, LayerSkipModel
from layerskip_models.norm import RMSNorm
from layerskip_models.parallel.ranks import Ranks
from layerskip_models.parallel.shard_plan import Part, ShardPlan
from layerskip_models.parallel.tensor_parallel_layers import TensorParallelLayers
from layerskip_models.parallel.vocabulary import merge, whole_logits


class SummedLinear:
    """A matrix of which a rank has some columns: the product is the sum over ranks. See `Linear`."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks
        self.num_bytes = part.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, own columns]. Returns [rows, out]."""
        return self._ranks.add_up(self._part(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual is added once, behind the sum."""
        return self._ranks.add_up(self._part(x)) + residual


class JointNorm(RMSNorm):
    """A norm over all heads of a row, of which a rank has some. x: [.., own width]; returns the same."""

    def __init__(self, part: RMSNorm, whole: int, ranks: Ranks) -> None:
        super().__init__(part.weight, part.eps, live=True)
        self._whole, self._ranks = whole, ranks

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = self._ranks.add_up(wide.square().sum(dim=-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self._whole + self.eps)).to(x.dtype).mul_(self.weight)


class ShardedModel(LayerSkipModel):
    """This rank's part of a model. All ranks must call the same methods in the same order.

    num_heads, num_kv_heads: of the part, so that KV caches are as large as it; vocab_size and config: of the whole model.
    """

    def __init__(self, part: LayerSkipModel, plan: ShardPlan, ranks: Ranks) -> None:
        vars(self).update(vars(part))
        self.config, self.vocab_size = plan.config, int(plan.config.vocab_size)
        self.plan, self.ranks = plan, ranks
        self._layers = [_summed(layer, plan, ranks) for layer in part._layers]
        self._native = None  # whole layers in one call know no sums in between
        self._halves = None if part._native is None or plan.joint_norms else TensorParallelLayers(part._native, ranks)
        parts = [Part.of(self.vocab_size, rank, ranks.size) for rank in range(ranks.size)]
        self._sizes, self._first_token = [one.size for one in parts], plan.vocab.start

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices, of this part."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.plan.inner.size)

    @property
    def num_ranks(self) -> int:
        return self.ranks.size

    @property
    def kernels(self) -> str | None:
        return None if self._halves is None else self._halves.variant

    def agree(self, numbers: Sequence[float], same: int = 0) -> list[float]:
        return self.ranks.agree(numbers, same)

    def all_agree(self, ok: bool) -> bool:
        return self.ranks.all_agree(ok)

    def on_one_team(self) -> AbstractContextManager[None]:
        return OneTeam() if isinstance(self._head, NativeLinear) else super().on_one_team()

    def run_layers(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        cache: KVCache | CacheRows,
        capture: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        if self._halves is None:
            return super().run_layers(hidden, start, stop, cache, capture)
        return self._halves.run(hidden, start, stop, cache_rows(cache, hidden.shape[0]), self._rotary, capture)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [rows]. Returns [rows, hidden]: each row from the rank that has it."""
        own = tokens - self._first_token
        there = (own >= 0) & (own < self._embedding.shape[0])
        rows = F.embedding(own.clamp(0, self._embedding.shape[0] - 1), self._embedding).to(self.dtype)
        return self.ranks.add_up(rows * there.unsqueeze(1))

    def embed_one(self, token: int) -> Tensor:
        return self.embed(torch.tensor([token], device=self.device))

    def _choices(self, head: Linear, hidden: Tensor, detail: Detail) -> Choices:
        if isinstance(head, NativeLinear):
            own = super()._choices(head, hidden, detail)
        else:
            own = choices_in_pieces(hidden, self.plan.vocab.size, partial(self._own_logits, head), detail)
        return merge(own, self._first_token, self.vocab_size, self.ranks)

    def _logits(self, head: Linear, hidden: Tensor) -> Tensor:
        return whole_logits(self._own_logits(head, hidden), max(self._sizes), self.ranks, self._sizes)

    def _own_logits(self, head: Linear, hidden: Tensor) -> Tensor:
        """Of this rank's part of the vocabulary."""
        return super()._logits(head, hidden)


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
