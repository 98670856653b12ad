"""Random tiny models of every family and shape that the engine supports, asked in milliseconds each."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from layerskip_models.families import FAMILIES, family_of
from looped_models import module_of

CONTEXT = 64
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def small_config(
    kind: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **own: Any
) -> PreTrainedConfig:
    """A configuration of one family, by model_type, of the given sizes, without special tokens."""
    return FAMILIES[kind].config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=CONTEXT,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")), **own,
    )  # fmt: skip


def draw_config(random: Random, kind: str, vocab_size: int) -> PreTrainedConfig:
    """A configuration of one family, by model_type, with heads, biases, windows and rotary embeddings as it has them."""
    heads, kv_heads = random.choice([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (6, 3), (6, 2), (8, 2), (5, 5)])
    head_dim = random.choice([2, 4, 6, 8, 16])
    biases = {"attention_bias": random.random() < 0.3, "mlp_bias": random.random() < 0.3}
    window = random.choice([2, 5, 9, 20])  # of a window of 1 transformers' own cache keeps more than that
    rope = dict(random.choice(list(ROPES.values())))
    own: dict[str, Any] = {"rope_parameters": rope}
    if kind in ("llama", "smollm3"):
        own |= biases
    if kind in ("qwen3", "olmo2"):
        own["attention_bias"] = biases["attention_bias"]
    if kind in (
        "llama",
        "mistral",
        "qwen3",
        "ouro",
        "nanbeige",
    ):  # whose heads together need not be as wide as the hidden state
        own["head_dim"], hidden_size = head_dim, heads * random.choice([1, 2, 4, 6, 8, 11, 16])
    else:
        hidden_size = heads * head_dim
    if kind == "mistral":
        own["sliding_window"] = random.choice([None, window])
    if kind in ("qwen2", "qwen3"):
        own |= {"use_sliding_window": random.random() < 0.5, "sliding_window": window, "max_window_layers": 1}
    if kind == "smollm3":
        own |= {"use_sliding_window": random.random() < 0.5, "sliding_window": window, "no_rope_layer_interval": 2}
    if kind == "phi3":
        own |= {"sliding_window": random.choice([None, window]), "rope_parameters": _phi3_rope(random, head_dim)}
    if kind in ("ouro", "nanbeige"):
        own |= looped_options(kind, random.choice([1, 2, 2, 3]))
    intermediate, num_layers = random.choice([5, 12, 20, 32, 67]), random.choice([2, 2, 3, 4, 4, 5, 6, 8])
    own |= {"vocab_size": vocab_size, "tie_word_embeddings": random.random() < 0.5}
    own["rms_norm_eps"] = random.choice([1e-6, 1e-5, 1e-3])
    return small_config(kind, hidden_size, intermediate, num_layers, heads, kv_heads, **own)


def looped_options(kind: str, loops: int, *, skip_norm: bool = False) -> dict[str, Any]:
    """Fields of a looped model's configuration, of which transformers has no defaults."""
    own: dict[str, Any] = {
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": dict(ROPES["default"]),
    }
    if kind == "ouro":
        return own | {"total_ut_steps": loops}
    return own | {"num_loops": loops, "loop_loss_weights": [], "skip_loop_final_norm": skip_norm}


def _phi3_rope(random: Random, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    rope["partial_rotary_factor"] = random.choice([1.0, 0.5]) if head_dim % 4 == 0 else 1.0
    if random.random() < 0.3:
        pairs = int(head_dim * rope["partial_rotary_factor"]) // 2
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": CONTEXT, "factor": 4.0}
        rope |= {"short_factor": [1.0 + 0.5 * i for i in range(pairs)], "long_factor": [9.0] * pairs}
    return rope


def random_model(config: PreTrainedConfig, *, late_scale: float, sharpness: float, seed: int) -> PreTrainedModel:
    """Random weights in float64, so that every dtype can be given the same, in evaluation mode.

    late_scale: of what the first layer adds to the residual stream every later one adds so much: the smaller, the more often
        an early exit says what the last layer says. (The first layer's part is large: the text would be one token else.)
    sharpness: standard deviation of a matrix's weights times the root of its columns.
    """
    family = family_of(config)
    model = module_of(config).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.dim() == 1:  # a bias
                parameter.normal_(0.0, 0.2, generator=generator)
            else:
                scale = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, sharpness * scale, generator=generator)
        for index, layer in enumerate(model.model.layers):
            scale = 3.0 if index == 0 else late_scale
            for last, norm in ((layer.self_attn.o_proj, family.output_norm), (layer.mlp.down_proj, family.down_norm)):
                (last if norm is None else getattr(layer, norm)).weight.mul_(scale)
    return model


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per word, pieces joined without anything between them; no special tokens."""
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
