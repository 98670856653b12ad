"""What runs a model's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

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
