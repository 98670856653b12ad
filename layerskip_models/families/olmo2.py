"""OLMo 2: norms after attention and the MLP, not before them; one norm over all queries of a row, one over all keys."""

from __future__ import annotations

from layerskip_models.families.family import Family, attention_biases

OLMO2 = Family(
    title="OLMo 2",
    model_type="olmo2",
    architecture="Olmo2",
    input_norm=None,
    post_attention_norm=None,
    output_norm="post_attention_layernorm",
    down_norm="post_feedforward_layernorm",
    query_norm="q_norm",
    key_norm="k_norm",
    norms_all_heads=True,
    biased=attention_biases,
)
