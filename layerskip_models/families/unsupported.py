"""What well-known architectures that cannot be run would need, for the message that refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_EXPERTS = "a mixture of experts in place of the MLP"
_SIDE_BY_SIDE = "attention and the MLP side by side, and LayerNorm"
_LEARNED = "learned positions, LayerNorm and an MLP without a gate"
_GEMMA = "scaled embeddings, norm weights that are counted from 1 and a GELU gate"
_STATES = "state-space layers, whose state cannot be rolled back by a length"
_IMAGES = "inputs other than text; its language model alone, saved as a checkpoint, may be of a supported architecture"

NEEDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gpt2", "gpt_bigcode", "opt", "gpt_neo", "biogpt", "xglm"), _LEARNED),
        **dict.fromkeys(("gptj", "gpt_neox", "phi", "cohere", "cohere2", "falcon"), _SIDE_BY_SIDE),
        **dict.fromkeys(("bloom", "mpt"), "ALiBi in place of rotary positions, and LayerNorm"),
        **dict.fromkeys(("stablelm", "starcoder2", "nemotron"), "LayerNorm in place of RMSNorm"),
        **dict.fromkeys(("gemma",), _GEMMA),
        **dict.fromkeys(("gemma2",), f"{_GEMMA}, norms on both sides of a layer, and capped logits"),
        **dict.fromkeys(("gemma3_text", "gemma3n_text"), f"{_GEMMA}, norms on both sides of a layer, and two rotary tables"),
        **dict.fromkeys(
            ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "phimoe", "granitemoe", "deepseek_v2", "deepseek_v3",
             "llama4_text", "gpt_oss", "glm4_moe", "dbrx", "jetmoe", "ernie4_5_moe", "minimax", "flex_olmo"),
            _EXPERTS,
        ),
        **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2", "rwkv", "falcon_h1"), _STATES),
        **dict.fromkeys(("llava", "mistral3", "gemma3", "gemma3n", "llama4", "mllama", "qwen2_vl", "qwen2_5_vl"), _IMAGES),
        **dict.fromkeys(("t5", "mt5", "bart", "whisper"), "an encoder, which attends to both sides"),
        **dict.fromkeys(("bert", "roberta", "modernbert"), "a decoder: it reads text in both directions and writes none"),
        "granite": "factors on embeddings, attention, residuals and logits",
        "olmo": "norms without weights, and clipped queries, keys and values",
        "olmo3": "a rotary table of its own for layers with a sliding window",
        "glm4": "norms on both sides of attention and the MLP, and rotary pairs that are adjacent",
        "ministral": "a sliding window in some layers; its layers are otherwise Mistral's",
    }
)  # fmt: skip
"""By model_type."""


def need_of(model_type: str) -> str:
    """Say what such a model would need, in words that follow "would need"."""
    return NEEDS.get(model_type, "a description of its layers, which nobody has written")
