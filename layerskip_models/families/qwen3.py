"""Qwen3 (its dense models): every head's query and key has a norm; later layers may have a sliding window."""

from __future__ import annotations

from layerskip_models.families.family import Family, attention_biases, listed_windows

QWEN3 = Family(
    title="Qwen3",
    model_type="qwen3",
    architecture="Qwen3",
    query_norm="q_norm",
    key_norm="k_norm",
    biased=attention_biases,
    sliding_window=listed_windows,
)
