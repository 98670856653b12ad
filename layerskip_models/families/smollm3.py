"""SmolLM3: every fourth layer goes without the rotary embedding."""

from __future__ import annotations

from layerskip_models.families.family import Family, listed_windows

SMOLLM3 = Family(
    title="SmolLM3",
    model_type="smollm3",
    architecture="SmolLM3",
    sliding_window=listed_windows,
    rotates=lambda config, layer: bool(config.no_rope_layers[layer]),
)
