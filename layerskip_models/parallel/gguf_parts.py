"""Parts of the tensors in a GGUF file, as a plan says, out of the mapped file."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedConfig

from layerskip_models.checkpoints.gguf_checkpoint import open_gguf
from layerskip_models.checkpoints.weight_files import Tensors
from layerskip_models.four_bits import FourBitWeight
from layerskip_models.parallel.part_files import Parts, cuts_of, one_behind_the_other
from layerskip_models.parallel.shard_plan import ShardPlan


class GgufParts(Parts):
    """See `Parts`. name: the file or its folder. config: unmarked. keep_packed: matrices of layers in 4 bits stay so."""

    def __init__(self, name: str, config: PreTrainedConfig, *, keep_packed: bool) -> None:
        super().__init__(Tensors(name, {}), {})
        self._tensors, self._keep_packed = open_gguf(name, config), keep_packed

    def has(self, name: str) -> bool:
        return name in self._tensors.names

    def read_packed(self, module: str, plan: ShardPlan) -> FourBitWeight | None:
        if not self._keep_packed:
            return None
        return self._joined(module, [self._tensors.four_bits(module, cut) for cut in cuts_of(f"{module}.weight", plan)])

    def _part(self, name: str, plan: ShardPlan) -> Tensor:
        return one_behind_the_other([self._tensors.floats(name, cut) for cut in cuts_of(name, plan)])
