"""What the machine allows: the bandwidth of its memory, and bytes that decoding must read.

One text at a time, every pass through a layer reads that layer's weights from memory once, however many rows it has; so does
every pass through the head. Tokens per second cannot exceed bandwidth / bytes per token. (Models that fit into a processor's
cache can seem to: their weights do not come from memory at all.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from time import perf_counter
from typing import Any

import torch

from layerskip_models import LayerSkipModel

_CPU_BYTES, _GPU_BYTES = 256 << 20, 2 << 30  # beyond any cache
_COLUMNS = 4096
_SECONDS = 1.0


def synchronize(device: torch.device) -> None:
    """Wait for what a device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which one large tensor is summed or multiplied by a vector: the fastest turn counts."""
    size = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    matrix = torch.zeros(size // 4 // _COLUMNS, _COLUMNS, dtype=torch.float32, device=device)
    vector = torch.zeros(_COLUMNS, dtype=torch.float32, device=device)
    readers: tuple[Callable[[], object], ...] = (matrix.sum, lambda: torch.mv(matrix, vector))
    best, turns, started = float("inf"), 0, perf_counter()
    while turns < 3 or perf_counter() - started < _SECONDS:
        for read in readers:
            synchronize(device)
            start = perf_counter()
            read()
            synchronize(device)
            best = min(best, perf_counter() - start)
        turns += 1
    return size / best


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes read per pass. layer: one decoder layer's weights; head: norm and head; kv: one layer's cache per position;
    draft_head: norm and the head that drafts are chosen with."""

    layer: int
    head: int
    kv: int
    draft_head: int

    @classmethod
    def of(cls, model: LayerSkipModel) -> WeightBytes:
        """Count a model's bytes as stored: 16-bit weights count as 16 bits, whatever dtype they are computed in."""
        kv = 2 * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize
        return cls(layer=model.layer_bytes, head=model.head_bytes, kv=kv, draft_head=model.draft_head_bytes)

    @classmethod
    def from_line(cls, limits: Mapping[str, Any]) -> WeightBytes:
        """Read them from a record's line of kind "limits"."""
        return cls(**{field.name: limits[f"{field.name}_bytes"] for field in fields(cls)})

    def as_line(self) -> dict[str, int]:
        """Name them as a record's line of kind "limits" does."""
        return {f"{name}_bytes": size for name, size in asdict(self).items()}

    def verified(self, stats: Mapping[str, Any], num_layers: int) -> float:
        """Return the bytes that a run's verification had to read. The rest of `moved` is of drafting."""
        context = stats["num_prompt_tokens"] + stats["num_new_tokens"] / 2
        return float(stats["rounds"] * (num_layers * (self.layer + self.kv * context) + self.head))

    def moved(self, stats: Mapping[str, Any]) -> float:
        """Return the bytes that a run's rounds had to read, learning aside. stats: of `GenerationStats.as_dict`."""
        context = stats["num_prompt_tokens"] + stats["num_new_tokens"] / 2
        loaded = stats["loaded_layers"] + stats["preverifier_layers"]  # Pacer's layer is one of the model's kind
        layers = loaded * (self.layer + self.kv * context)
        drafted = stats["num_drafted"] - stats["num_copied"]
        return float(layers + stats["rounds"] * self.head + drafted * self.draft_head)
