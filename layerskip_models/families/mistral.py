"""Mistral: rows of every layer attend to a sliding window, where the configuration has one (version 0.1 of the 7B)."""

from __future__ import annotations

from layerskip_models.families.family import Family, no_biases

MISTRAL = Family(
    title="Mistral 7B, Mistral Nemo",
    model_type="mistral",
    architecture="Mistral",
    biased=no_biases,
    sliding_window=lambda config, layer: config.sliding_window,
)
