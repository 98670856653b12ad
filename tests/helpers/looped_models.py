"""Looped models in plain PyTorch, written from the families' descriptions: what the engine's logits are compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from layerskip_models.checkpoints.parameters import parameter_shapes
from layerskip_models.families import FAMILIES
from layerskip_models.families.plain_config import known_config

LOOPED = ("ouro", "nanbeige")
_NORMS = {
    "ouro": ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"),
    "nanbeige": ("input_layernorm", None, "post_attention_layernorm", None),
}
"""Before attention, after it, before the MLP, after it."""


def boundary_logits(said: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: list[int]) -> list[Tensor]:
    """The logits after each loop, [tokens, vocab], of a config.json's fields and the tensors beside it."""

    def norm(x: Tensor, name: str | None) -> Tensor:
        if name is None:
            return x
        half = x.float()  # as in transformers, whatever the rest is computed in
        normed = half * torch.rsqrt(half.square().mean(-1, keepdim=True) + said["rms_norm_eps"])
        return normed.to(x.dtype) * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    def rotated(heads: Tensor) -> Tensor:
        half = size // 2
        frequencies = said["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) * 2 / size)
        angles = torch.outer(torch.arange(len(tokens), dtype=torch.float64), frequencies).unsqueeze(1)
        first, second = heads[..., :half], heads[..., half:]
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(turned, -1)

    def attention(x: Tensor, place: str) -> Tensor:
        query, key, value = (linear(x, f"{place}.self_attn.{name}_proj").view(len(tokens), -1, size) for name in "qkv")
        query, key = rotated(query), rotated(key)
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
        ahead = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        weight = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return linear(torch.einsum("hqk,khd->qhd", weight, value).flatten(1), f"{place}.self_attn.o_proj")

    def mlp(x: Tensor, place: str) -> Tensor:
        gate, up = linear(x, f"{place}.mlp.gate_proj"), linear(x, f"{place}.mlp.up_proj")
        return linear(F.silu(gate) * up, f"{place}.mlp.down_proj")

    size = said["head_dim"]
    found, x = [], weights["model.embed_tokens.weight"][tokens]
    for _ in range(said.get("total_ut_steps", said.get("num_loops", 1))):
        for layer in range(said["num_hidden_layers"]):
            place = f"model.layers.{layer}"
            before, after, before_mlp, after_mlp = (
                None if name is None else f"{place}.{name}" for name in _NORMS[said["model_type"]]
            )
            x = x + norm(attention(norm(x, before), place), after)
            x = x + norm(mlp(norm(x, before_mlp), place), after_mlp)
        normed = norm(x, "model.norm")
        found.append(linear(normed, "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"))
        x = x if said.get("skip_loop_final_norm") else normed
    return found


def looped_fields(kind: str, seed: int, vocab_size: int, **own: Any) -> dict[str, Any]:
    """A config.json as the hub has it, of random small sizes."""
    random = Random(f"{kind} {seed}")
    heads, kv_heads = random.choice([(2, 2), (4, 2), (3, 1), (4, 4)])
    fields: dict[str, Any] = {
        "architectures": [FAMILIES[kind].model_name], "model_type": kind, "torch_dtype": "float32", "use_cache": True,
        "auto_map": {"AutoConfig": f"configuration_{kind}.{FAMILIES[kind].architecture}Config"},
        "vocab_size": vocab_size, "hidden_size": random.choice([16, 20, 32]), "intermediate_size": random.choice([12, 32, 44]),
        "num_hidden_layers": random.choice([1, 2, 3]), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": random.choice([4, 8, 16]), "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": random.random() < 0.3,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if kind == "ouro":
        fields |= {"total_ut_steps": random.choice([2, 3, 4]), "early_exit_threshold": 1.0, "sliding_window": None}
        fields |= {"use_sliding_window": False, "layer_types": ["full_attention"] * fields["num_hidden_layers"]}
    else:
        fields |= {"num_loops": random.choice([2, 3]), "loop_loss_weights": [], "skip_loop_final_norm": seed % 3 == 2}
    fields["hidden_size"] = heads * max(fields["hidden_size"] // heads, 1)
    return fields | own


def looped_weights(said: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random tensors of a config.json's model, rounded to bfloat16, with Ouro's gate."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(parameter_shapes(known_config(FAMILIES[said["model_type"]], said)))
    if said["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    if said["model_type"] == "ouro":
        shapes |= {"model.early_exit_gate.weight": (1, said["hidden_size"]), "model.early_exit_gate.bias": (1,)}
    weights = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        scale = 1.0 if "embed" in name else 1.5 * shape[-1] ** -0.5
        weights[name] = (0.8 + 0.2 * drawn if "norm" in name else drawn * scale).bfloat16().to(dtype)
    return weights


def write_folder(folder: Path, said: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """In the hub's layout, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(said)), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
