"""What the memory bus allows: measured bandwidth, and the bytes that decoding must read.

At batch 1 every pass through a layer reads that layer's weights from memory once, however many rows it has; so does every
pass through the head. Tokens per second cannot exceed bandwidth / bytes per token. (Models that fit into a processor's cache
can seem to: their weights do not come from memory at all.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from layerskip_models import LayerSkipModel
from selfspec.calibrate import synchronize

_CPU_BYTES, _GPU_BYTES = 256 << 20, 2 << 30  # beyond any cache
_SECONDS = 0.5


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second with which one large tensor is summed: the best turn of half a second's, of at least three."""
    size = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    data = torch.zeros(size // 4, dtype=torch.float32, device=device)
    best, turns, started = float("inf"), 0, perf_counter()
    while turns < 3 or perf_counter() - started < _SECONDS:
        synchronize(device)
        start = perf_counter()
        data.sum()
        synchronize(device)
        best = min(best, perf_counter() - start)
        turns += 1
    return size / best


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes read per pass. layer: one decoder layer's weights; head: norm and head; kv: one layer's cache per position."""

    layer: int
    head: int
    kv: int

    @classmethod
    def of(cls, model: LayerSkipModel) -> WeightBytes:
        """Of a model's shapes and dtype."""
        hidden, inner = model.hidden_size, model.config.intermediate_size
        heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
        size = torch.empty(0, dtype=model.dtype).element_size()
        layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner + 2 * hidden
        return cls(layer=layer * size, head=(model.vocab_size + 1) * hidden * size, kv=2 * kv_heads * dim * size)

    def moved(self, stats: Mapping[str, Any]) -> float:
        """Bytes that a run's rounds had to read, learning aside; `stats` is of `GenerationStats.as_dict`."""
        context = stats["num_prompt_tokens"] + stats["num_new_tokens"] / 2
        loaded = stats["loaded_layers"] + stats.get("preverifier_layers", 0)  # Pacer's layer is one of the model's kind
        layers = loaded * (self.layer + self.kv * context)
        return float(layers + (stats["rounds"] + stats["num_drafted"]) * self.head)
