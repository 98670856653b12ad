"""The supported families, each as what its layers do otherwise than Llama's."""

from __future__ import annotations

from typing import Any

from layerskip_models.families.family import Biased, Family, attention_biases, listed_windows, no_biases

_PLAIN: dict[str, Any] = {
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}

LLAMA = Family(
    title="Llama 2, Llama 3, CodeLlama",
    model_type="llama",
    architecture="Llama",
    plain={**_PLAIN, **_ENDS, "head_dim": None, "attention_bias": False, "mlp_bias": False},
)
"""Llama 2, Llama 3 and CodeLlama: what the other families are compared with."""

MISTRAL = Family(
    title="Mistral 7B, Mistral Nemo",
    model_type="mistral",
    architecture="Mistral",
    biased=no_biases,
    sliding_window=lambda config, layer: config.sliding_window,
    plain={**_PLAIN, **_ENDS, "head_dim": None, "sliding_window": 4096},
)
"""Mistral: rows of every layer attend to a sliding window, where the configuration has one (version 0.1 of the 7B)."""

_LOOPED: dict[str, Any] = {
    **_PLAIN, "head_dim": None, "attention_bias": False, "mlp_bias": False, "layer_types": None, "sliding_window": None,
}  # fmt: skip

NANBEIGE = Family(
    title="Nanbeige4.2, a looped model",
    model_type="nanbeige",
    architecture="Nanbeige",
    foreign=True,
    ropes=("default",),
    biased=no_biases,
    loops=lambda config: len(config.loop_loss_weights) + 1 if config.loop_loss_weights else config.num_loops,
    set_loops=lambda loops: {"num_loops": loops, "loop_loss_weights": ()},
    loop_norm=lambda config: not config.skip_loop_final_norm,
    plain={**_LOOPED, "num_loops": 1, "loop_loss_weights": (), "skip_loop_final_norm": False},
    fixed=dict.fromkeys(
        ("attention_bias", "mlp_bias", "qk_layernorm", "enable_double_loop_split", "loop_middle_layers", "loop_share_kv",
         "enable_depth_attention", "enable_hyper_connection", "enable_mhc", "enable_h_res_identity", "emb_neighbor_num",
         "insert_ngram_layer_idx", "ngram_insert_all_layers"),
        False,
    ),
)  # fmt: skip
"""Nanbeige4.2: Llama's layers, all of them run twice, with the last norm between the loops."""

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
"""OLMo 2: norms after attention and the MLP, not before them; one norm over all queries of a row, one over all keys."""


OURO = Family(
    title="Ouro, a looped model",
    model_type="ouro",
    architecture="Ouro",
    foreign=True,
    ropes=("default",),
    output_norm="input_layernorm_2",
    down_norm="post_attention_layernorm_2",
    biased=no_biases,
    loops=lambda config: config.total_ut_steps,
    set_loops=lambda loops: {"total_ut_steps": loops},
    loop_norm=lambda config: True,
    plain={**_LOOPED, "total_ut_steps": 4},
    fixed={
        "attention_bias": False, "mlp_bias": False, "skip_loop_final_norm": False, "early_exit_threshold": 1.0,
        "early_exit_step": None,
    },
    gate="model.early_exit_gate",
)  # fmt: skip
"""Ouro: all layers are run four times, with the last norm between the loops; norms before and after attention and the MLP."""


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
"""Phi-3, Phi-3.5 and Phi-4: matrices that are fused in the checkpoint, a sliding window, and a rotary embedding that may turn
only part of a head.

With "longrope" transformers takes other angles for a whole text once it is longer than the original context, so that keys
which are cached would have to be computed again. Here such a model runs up to its original context."""

QWEN2 = Family(
    title="Qwen2, Qwen2.5",
    model_type="qwen2",
    architecture="Qwen2",
    biased=lambda config: Biased(qkv=True),
    sliding_window=listed_windows,
    plain={**_PLAIN, "layer_types": None, "sliding_window": None},
)
"""Qwen2 and Qwen2.5: biases on queries, keys and values; later layers may have a sliding window."""

QWEN3 = Family(
    title="Qwen3",
    model_type="qwen3",
    architecture="Qwen3",
    query_norm="q_norm",
    key_norm="k_norm",
    biased=attention_biases,
    sliding_window=listed_windows,
    plain={**_PLAIN, "head_dim": 128, "attention_bias": False, "layer_types": None, "sliding_window": None},
)
"""Qwen3 (its dense models): every head's query and key has a norm; later layers may have a sliding window."""

SMOLLM3 = Family(
    title="SmolLM3",
    model_type="smollm3",
    architecture="SmolLM3",
    sliding_window=listed_windows,
    rotates=lambda config, layer: bool(config.no_rope_layers[layer]),
)
"""SmolLM3: every fourth layer goes without the rotary embedding."""
