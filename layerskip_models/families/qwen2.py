"""Qwen2 and Qwen2.5: biases on queries, keys and values; later layers may have a sliding window."""

from __future__ import annotations

from transformers import Qwen2Config, Qwen2ForCausalLM

from layerskip_models.families.family import Family, listed_windows

# Biases need no word here: they are taken from any linear that has one.
QWEN2 = Family(title="Qwen2, Qwen2.5", config=Qwen2Config, model=Qwen2ForCausalLM, sliding_window=listed_windows)
