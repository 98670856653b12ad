"""What each rank of a divided model holds, reads and sends, computed from its configuration: nothing is loaded for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from layerskip_models.checkpoints.config_checks import shell_of
from layerskip_models.checkpoints.conversion import DRAFT_HEAD_BYTES, arithmetic_dtype
from layerskip_models.parallel.shard_plan import ShardPlan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_CHOICE_NUMBERS = 2  # float64, of a row's likeliest token: see `vocabulary.numbers_of`


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSize:
    """Memory of one rank, all in bytes.

    layers, head, draft_head, embedding, norms: weights. Without our kernels a tied head is the embedding, and counted once.
    kv_per_token: keys and values of one position in all layers. read_per_pass: weights that a plain step reads.
    sent_per_row: what the rank sends for one row of a plain step: sums in rings on GPUs, and whole parts on a CPU, in fewer
        steps. sums_per_pass: how many of them.
    """

    ranks: int
    layers: int
    head: int
    draft_head: int
    embedding: int
    norms: int
    kv_per_token: int
    read_per_pass: int
    sent_per_row: int
    sums_per_pass: int

    @property
    def weights(self) -> int:
        return self.layers + self.head + self.draft_head + self.embedding + self.norms


def shard_size(config: PreTrainedConfig, rank: int, ranks: int, dtype: torch.dtype, device: torch.device) -> ShardSize:
    """What one of `ranks` processes has. dtype: of the weights. On a CPU our kernels keep 16 bits and compute in float32.

    Raises ValueError for a number of ranks that the model cannot be divided by.
    """
    plan = ShardPlan.of(config, rank, ranks)
    local: Any = plan.local_config()
    shell: Any = shell_of(local, "the model")
    wide = arithmetic_dtype(dtype, device).itemsize
    stored = dtype.itemsize
    sizes = {"layers": 0, "norms": 0}
    for name, parameter in shell.named_parameters():
        if "layers." in name and parameter.dim() == 2:
            sizes["layers"] += parameter.numel() * stored
        elif "layers." in name or name == "model.norm.weight":  # norms, and biases, which are few
            sizes["norms"] += parameter.numel() * wide
    vocabulary = prod(shell.lm_head.weight.shape)
    head = vocabulary * stored
    kernels = device.type == "cpu" and dtype in (torch.bfloat16, torch.float16, torch.float32)
    tied = bool(local.tie_word_embeddings)
    # On our kernels a tied head is a copy in their layout, which in bfloat16 is the embedding itself.
    embedding = 0 if tied and (not kernels or dtype == torch.bfloat16) else vocabulary * stored
    draft_head = plan.vocab.size * (local.hidden_size + 4) if kernels and head >= DRAFT_HEAD_BYTES else 0
    num_layers, hidden = int(local.num_hidden_layers), int(local.hidden_size)
    sums = 2 * num_layers + 1 if ranks > 1 else 0  # after attention, after the MLP, and the embedding
    ring = (ranks - 1) * (1 if device.type == "cpu" else 2 / ranks)
    return ShardSize(
        ranks=ranks,
        head=head,
        draft_head=draft_head,
        embedding=embedding,
        kv_per_token=2 * num_layers * plan.kv_heads.size * plan.head_dim * wide,
        read_per_pass=sizes["layers"] + sizes["norms"] + head,
        sent_per_row=round(sums * ring * hidden * wide) + (8 * _CHOICE_NUMBERS * (ranks - 1) if ranks > 1 else 0),
        sums_per_pass=sums,
        **sizes,
    )


def largest_shard(config: PreTrainedConfig, ranks: int, dtype: torch.dtype, device: torch.device) -> ShardSize:
    """The size of the rank that holds most."""
    return max((shard_size(config, rank, ranks, dtype, device) for rank in range(ranks)), key=lambda size: size.weights)
