"""Which part of every weight a rank holds: heads and the inner width of the MLP are split, and the vocabulary of the head.

Query, key, value, gate and up lose rows, output and down lose columns, so that what a rank computes of attention and of the
MLP needs nothing of the others until its very end, where one sum over ranks follows. The parts are cut before anything is
fused. Norms are on every rank.
Source of the scheme: Shoeybi et al. 2019, *Megatron-LM*, section 3.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerskip_models.checkpoints.packed_weights import WHOLE, Cut
from layerskip_models.families import family_of, head_dim_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Part:
    """Numbers [start, stop) of one dimension."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @classmethod
    def of(cls, total: int, rank: int, ranks: int, unit: int = 1) -> Part:
        """A rank's share, the first ones larger by one where it does not divide. unit: what is not cut, if it divides it."""
        if unit > 1 and total % unit == 0:
            return cls.of(total // unit, rank, ranks).times(unit)
        base, more = divmod(total, ranks)
        start = rank * base + min(rank, more)
        return cls(start, start + base + (rank < more))

    def times(self, width: int) -> Part:
        """The same in smaller units, `width` to each of these."""
        return Part(self.start * width, self.stop * width)

    def after(self, offset: int) -> Part:
        """The same, after `offset` others."""
        return Part(self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """A rank's part of a model: query heads, key-value heads, inner width and vocabulary.

    With fewer key-value heads than ranks, ranks whose query heads share one hold a copy of it each, and these query heads
    need not divide: the first ranks may have one more.
    """

    config: PreTrainedConfig
    rank: int
    ranks: int
    head_dim: int
    heads: Part
    kv_heads: Part
    inner: Part
    vocab: Part

    @classmethod
    def of(cls, config: Any, rank: int, ranks: int, unit: int = 1) -> ShardPlan:
        """unit: inputs of the output and down projections that stay together, where their number is a multiple of it.

        Raises ValueError for a number of ranks that the model cannot be divided by.
        """
        heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        head_dim = head_dim_of(config)
        inner = int(config.intermediate_size)
        whole = heads * head_dim % unit == 0  # else the output projection has no units to be cut at
        units = inner // unit if inner % unit == 0 else inner

        def fits(number: int) -> bool:
            if (kv_heads % number and number % kv_heads) or units < number:
                return False
            starts = (_heads(heads, kv_heads, one, number)[0].start for one in range(number))
            return not whole or all(start * head_dim % unit == 0 for start in starts)

        fitting = [number for number in range(1, heads + 1) if fits(number)]
        if ranks not in fitting or config.vocab_size < 2 * ranks:
            inputs = f" between groups of {unit} inputs, as weights of 4 bits must be" if unit > 1 else ""
            raise ValueError(
                f"{heads} heads on {kv_heads} key-value heads and an inner width of {inner} cannot be divided over "
                f"{ranks} processes{inputs}: take {', '.join(map(str, fitting))}"
            )
        queries, keys = _heads(heads, kv_heads, rank, ranks)
        return cls(
            config=config,
            rank=rank,
            ranks=ranks,
            head_dim=head_dim,
            heads=queries,
            kv_heads=keys,
            inner=Part.of(inner, rank, ranks, unit),
            vocab=Part.of(int(config.vocab_size), rank, ranks),
        )

    def num_inputs(self, kind: str) -> int | None:
        """Inputs of the whole matrix, if ranks divide its inputs ("output" and "down"); None for others."""
        config: Any = self.config
        sizes = {"output": config.num_attention_heads * self.head_dim, "down": int(config.intermediate_size)}
        return sizes.get(kind)

    def local_config(self) -> PreTrainedConfig:
        """The configuration of a model that is as large as this part."""
        local: Any = copy.deepcopy(self.config)
        local.head_dim = self.head_dim
        local.num_attention_heads, local.num_key_value_heads = self.heads.size, self.kv_heads.size
        local.intermediate_size, local.vocab_size = self.inner.size, self.vocab.size
        local.pad_token_id = None  # may lie in another part
        return local

    def cuts(self, name: str) -> Sequence[Cut]:
        """What to keep of a parameter, by its name in transformers' model: parts, which are joined along its rows.

        A bias that is added after the sum over ranks is whole: rank 0 alone adds it (`added_elsewhere`).
        """
        *_, module, kind = name.split(".")
        config: Any = self.config
        query = self.heads.times(self.head_dim)
        keys = self.kv_heads.times(self.head_dim)
        all_queries, all_keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        rows: dict[str, tuple[Part, ...]] = {
            "q_proj": (query,),
            "k_proj": (keys,),
            "v_proj": (keys,),
            "qkv_proj": (query, keys.after(all_queries), keys.after(all_queries + all_keys)),
            "gate_proj": (self.inner,),
            "up_proj": (self.inner,),
            "gate_up_proj": (self.inner, self.inner.after(int(config.intermediate_size))),
            "embed_tokens": (self.vocab,),
            "lm_head": (self.vocab,),
        }
        if module in rows:
            return _cuts(0, *rows[module])
        if self.joint_norms and module in ("q_norm", "k_norm"):
            return _cuts(0, query if module == "q_norm" else keys)
        if kind == "weight" and module in ("o_proj", "down_proj"):
            return _cuts(1, query if module == "o_proj" else self.inner)
        return WHOLE

    def added_elsewhere(self, name: str) -> bool:
        """Whether this is a bias that one rank alone must add, and another one than this does."""
        return self.rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias"))

    @property
    def joint_norms(self) -> bool:
        """Whether queries and keys are normed over all heads of a row together, and not each by itself."""
        family = family_of(self.config)
        return family.query_norm is not None and self.config.model_type == "olmo2"


def _cuts(dim: int, *parts: Part) -> list[Cut]:
    return [(dim, range(part.start, part.stop)) for part in parts]


def _heads(heads: int, kv_heads: int, rank: int, ranks: int) -> tuple[Part, Part]:
    """A rank's query heads and key-value heads."""
    shared = max(ranks // kv_heads, 1)  # ranks on one key-value head
    own = Part.of(kv_heads, rank // shared, ranks // shared)
    group = heads // kv_heads
    queries = Part.of(group, rank % shared, shared).after(own.start * group) if shared > 1 else own.times(group)
    return queries, own
