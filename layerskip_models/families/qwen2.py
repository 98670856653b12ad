"""Qwen2 and Qwen2.5: biases on queries, keys and values; later layers may have a sliding window."""

from __future__ import annotations

from layerskip_models.families.family import Biased, Family, listed_windows

QWEN2 = Family(
    title="Qwen2, Qwen2.5",
    model_type="qwen2",
    architecture="Qwen2",
    biased=lambda config: Biased(qkv=True),
    sliding_window=listed_windows,
)
