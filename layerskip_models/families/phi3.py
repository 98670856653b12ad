"""Phi-3, Phi-3.5 and Phi-4: matrices that are fused in the checkpoint, a sliding window, and a rotary embedding that may turn
only part of a head.

With "longrope" transformers takes other angles for a whole text once it is longer than the original context, so that keys
which are cached would have to be computed again. Here such a model runs up to its original context.
"""

from __future__ import annotations

from typing import Any

from layerskip_models.families.family import Family, no_biases


def _max_positions(config: Any) -> int:
    rope = config.rope_parameters
    if rope["rope_type"] != "longrope":
        return config.max_position_embeddings
    return min(config.max_position_embeddings, rope["original_max_position_embeddings"])


PHI3 = Family(
    title="Phi-3, Phi-3.5, Phi-4",
    model_type="phi3",
    architecture="Phi3",
    ropes=("default", "longrope"),
    qkv=("qkv_proj",),
    gate_up=("gate_up_proj",),
    biased=no_biases,
    sliding_window=lambda config, layer: config.sliding_window,
    rotates_part=True,
    max_positions=_max_positions,
)
