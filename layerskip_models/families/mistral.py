"""Mistral: rows of every layer attend to a sliding window, where the configuration has one (version 0.1 of the 7B)."""

from __future__ import annotations

from transformers import MistralConfig, MistralForCausalLM

from layerskip_models.families.family import Family

MISTRAL = Family(
    title="Mistral 7B, Mistral Nemo",
    config=MistralConfig,
    model=MistralForCausalLM,
    sliding_window=lambda config, layer: config.sliding_window,
)
