"""Looped models in plain PyTorch, written from the families' descriptions: what the engine's logits are compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.checkpoints.conversion import build_model
from layerskip_models.checkpoints.parameters import parameter_shapes, rotary_frequencies
from layerskip_models.checkpoints.weights import ModuleWeights
from layerskip_models.families import FAMILIES, IN_TRANSFORMERS, family_of
from layerskip_models.families.plain_config import known_config
from layerskip_models.linear import Layout

LOOPED = tuple(kind for kind in FAMILIES if kind not in IN_TRANSFORMERS)
_NORMS = {
    "ouro": ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"),
    "nanbeige": ("input_layernorm", None, "post_attention_layernorm", None),
}
"""Before attention, after it, before the MLP, after it."""


def boundary_logits(said: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]) -> list[Tensor]:
    """The logits after each loop, [tokens, vocab], of a config.json's fields and the tensors beside it."""

    def norm(x: Tensor, name: str | None) -> Tensor:
        if name is None:
            return x
        single = x.float()  # as in transformers, whatever the rest is computed in
        normed = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + said["rms_norm_eps"])
        return normed.to(x.dtype) * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    def rotated(heads: Tensor) -> Tensor:
        frequencies = said["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.outer(torch.arange(len(tokens), dtype=torch.float64), frequencies).unsqueeze(1)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(x: Tensor, place: str) -> Tensor:
        query, key, value = (linear(x, f"{place}.self_attn.{name}_proj").unflatten(-1, (-1, size)) for name in "qkv")
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (rotated(key), value))
        scores = torch.einsum("qhd,khd->hqk", rotated(query), key) / size**0.5
        ahead = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        chances = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return linear(torch.einsum("hqk,khd->qhd", chances, value).flatten(1), f"{place}.self_attn.o_proj")

    def mlp(x: Tensor, place: str) -> Tensor:
        gate, up = linear(x, f"{place}.mlp.gate_proj"), linear(x, f"{place}.mlp.up_proj")
        return linear(F.silu(gate) * up, f"{place}.mlp.down_proj")

    size, found, x = said["head_dim"], [], weights["model.embed_tokens.weight"][list(tokens)]
    for _ in range(said["total_ut_steps"] if said["model_type"] == "ouro" else said["num_loops"]):
        for layer in range(said["num_hidden_layers"]):
            place = f"model.layers.{layer}"
            norms = [None if name is None else f"{place}.{name}" for name in _NORMS[said["model_type"]]]
            x = x + norm(attention(norm(x, norms[0]), place), norms[1])
            x = x + norm(mlp(norm(x, norms[2]), place), norms[3])
        normed = norm(x, "model.norm")
        found.append(linear(normed, "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"))
        x = x if said.get("skip_loop_final_norm") else normed
    return found


class LoopedReference(PreTrainedModel, GenerationMixin):
    """The same as a module with the names of a family's checkpoint, which transformers' `generate` runs without a cache."""

    config_class = PreTrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, shape in parameter_shapes(config).items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path if name != "lm_head.weight" or not config.tie_word_embeddings else ():
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.ModuleList() if part == "layers" else nn.Module())
                module = module.get_submodule(part)
            if module is not self:
                setattr(module, leaf, nn.Parameter(torch.zeros(shape)))
        self.generation_config.pad_token_id = None

    def forward(self, input_ids: Tensor, attention_mask: object = None, **_: Any) -> CausalLMOutput:
        config: Any = self.config
        said = {**vars(config), "model_type": config.model_type, "rope_theta": config.rope_parameters["rope_theta"]}
        (tokens,) = input_ids.tolist()
        return CausalLMOutput(logits=boundary_logits(said, dict(self.named_parameters()), tokens)[-1].unsqueeze(0))

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: object = None, **_: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids}


class _ReferenceWeights(ModuleWeights):
    def rotary(self) -> tuple[Tensor, float]:
        return rotary_frequencies(self.config)


def module_of(config: PreTrainedConfig) -> PreTrainedModel:
    """transformers' model of a configuration, or the reference of a looped one."""
    return LoopedReference(config) if family_of(config).foreign else family_of(config).model(config)


def converted(model: PreTrainedModel, layout: Layout | None = None) -> LayerSkipModel:
    """`from_transformers`, of a reference as well."""
    if not isinstance(model, LoopedReference):
        return from_transformers(model, layout=layout)
    weights = _ReferenceWeights(model, model.config)
    return build_model(weights, dtype=next(model.parameters()).dtype, layout=layout, device=model.device)


def looped_fields(kind: str, seed: int, vocab_size: int, **own: Any) -> dict[str, Any]:
    """A config.json as the hub has it, of random small sizes."""
    random = Random(f"{kind} {seed}")
    heads, kv_heads = random.choice([(2, 2), (4, 2), (3, 1), (4, 4)])
    fields: dict[str, Any] = {
        "architectures": [FAMILIES[kind].model_name], "model_type": kind, "torch_dtype": "float32", "use_cache": True,
        "auto_map": {"AutoConfig": f"configuration_{kind}.{FAMILIES[kind].architecture}Config"},
        "vocab_size": vocab_size, "hidden_size": heads * random.choice([4, 5, 8]),
        "intermediate_size": random.choice([12, 32, 44]), "num_hidden_layers": random.choice([1, 2, 3]),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": random.choice([4, 8, 16]),
        "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "hidden_act": "silu", "tie_word_embeddings": random.random() < 0.3, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if kind == "ouro":
        fields |= {"total_ut_steps": random.choice([2, 3, 4]), "early_exit_threshold": 1.0, "sliding_window": None}
        layers = own.get("num_hidden_layers", fields["num_hidden_layers"])
        fields |= {"use_sliding_window": False, "layer_types": ["full_attention"] * layers}
    else:
        fields |= {"num_loops": random.choice([2, 3]), "loop_loss_weights": [], "skip_loop_final_norm": seed % 3 == 2}
    return fields | own


def looped_weights(said: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Random tensors of a config.json's model in float64, rounded to bfloat16; Ouro's with the gate."""
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
        weights[name] = (0.8 + 0.2 * drawn if "norm" in name else drawn * scale).bfloat16().double()
    return weights


def write_folder(folder: Path, said: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """In the hub's layout, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(said)), encoding="utf-8")
    save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
