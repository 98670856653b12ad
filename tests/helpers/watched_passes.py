"""What a model runs and what its operators allocate, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache, cache_rows


class CountingModel:
    """Counts (layer, position) pairs and rows of the head as they run; everything else is the model's own."""

    def __init__(self, model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: Counter[tuple[int, int]] = Counter()
        self.heads = 0
        run_layers = model.run_layers

        def counted_layers(hidden: Tensor, start: int, stop: int, cache: KVCache, *capture: Any) -> Tensor:
            ((own, number),) = cache_rows(cache, hidden.shape[0])  # of one text
            position = own.position(start, stop)
            self.ran.update((layer, position + row) for layer in range(start, stop) for row in range(number))
            return run_layers(hidden, start, stop, cache, *capture)

        monkeypatch.setattr(model, "run_layers", counted_layers)
        for name in ("logits", "draft_logits", "choices", "draft_choices"):
            monkeypatch.setattr(model, name, self._counted_head(getattr(model, name)))

    def _counted_head(self, head: Callable[..., Any]) -> Callable[..., Any]:
        def counted(hidden: Tensor, *detail: Any) -> Any:
            self.heads += hidden.shape[0]
            return head(hidden, *detail)

        return counted

    def take(self) -> tuple[Counter[tuple[int, int]], int]:
        """What ran since the last call."""
        ran, heads = self.ran, self.heads
        self.ran, self.heads = Counter(), 0
        return ran, heads


class LargestAllocation(TorchDispatchMode):
    """Remembers the largest new storage that any operator returned, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.operator = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                size = tensor.untyped_storage().nbytes()
                if size > self.num_bytes:
                    self.num_bytes, self.operator = size, str(func)
        return out
