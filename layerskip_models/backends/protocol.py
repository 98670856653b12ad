"""The two protocols that a model is put together from: one for its layers, one for its embedding and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from layerskip_models.choices import Choices, Detail
from layerskip_models.decoder_layer import Linear
from layerskip_models.kv_cache import CacheRows

Capture = Callable[[int, Tensor], None]
"""Called after each layer as capture(layers_done, hidden), hidden: [rows, hidden]."""


class LayerBackend(Protocol):
    """Runs a range of layers over the next rows of one sequence or of several.

    variant: which variant of our kernels runs the layers ("avx2", ...); None where PyTorch's operators do.
    """

    @property
    def variant(self) -> str | None: ...

    def run(
        self, hidden: Tensor, start: int, stop: int, rows: CacheRows, rotary: Tensor, capture: Capture | None
    ) -> Tensor:
        """Run layers [start, stop), extend the caches, and return [rows, hidden]; see `LayerSkipModel.run_layers`.

        rotary: the model's rotary table, for all positions from 0 on.
        """
        ...


class VocabularyBackend(Protocol):
    """A model's two ends: tokens to hidden states, and hidden states to logits. size: tokens of the whole model."""

    size: int

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [rows]. Returns [rows, hidden]."""
        ...

    def embed_one(self, token: int) -> Tensor:
        """Returns [1, hidden]."""
        ...

    def logits(self, head: Linear, hidden: Tensor) -> Tensor:
        """Norm and head. hidden: [rows, hidden]. Returns float32 [rows, vocab]."""
        ...

    def choices(self, head: Linear, hidden: Tensor, detail: Detail) -> Choices:
        """The same, reduced to the best token of each row."""
        ...
