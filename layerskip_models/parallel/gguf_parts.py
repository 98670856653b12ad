"""Parts of the tensors in a GGUF file, as a plan says, out of the mapped file."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from layerskip_models.checkpoints.gguf_checkpoint import open_gguf
from layerskip_models.four_bits import FourBitWeight
from layerskip_models.parallel.part_files import Parts, check_scales, cuts_of
from layerskip_models.parallel.shard_plan import ShardPlan


class GgufParts(Parts):
    """See `Parts`. name: the file or its folder. config: unmarked. keep_packed: matrices of layers in 4 bits stay so."""

    def __init__(self, name: str, config: PreTrainedConfig, *, keep_packed: bool) -> None:
        super().__init__(name, {})
        self._tensors, self._keep_packed = open_gguf(name, config), keep_packed

    def read_packed(self, module: str, plan: ShardPlan) -> FourBitWeight | None:
        if not self._keep_packed:
            return None
        found = [self._tensors.four_bits(module, cut) for cut in cuts_of(f"{module}.weight", plan)]
        weights = [weight for weight in found if weight is not None]
        if not weights:  # a tensor has one type
            return None
        weight = FourBitWeight.cat(weights)
        check_scales(self._name, module, weight)
        return weight

    def _part(self, name: str, plan: ShardPlan) -> Tensor:
        return torch.cat([self._tensors.floats(name, cut) for cut in cuts_of(name, plan)])
