"""transformers' own code that prepares a call, without one of its models in memory.

Importing this file imports transformers' `generate` and, with it, PyTorch's compiler: a second, which the first call pays.
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig


class GenerationHost(GenerationMixin):
    """Lets transformers' own code prepare a call without a transformers model in memory."""

    def __init__(self, config: PreTrainedConfig, generation_config: GenerationConfig, device: torch.device) -> None:
        self.config = config
        self.generation_config = generation_config
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device
