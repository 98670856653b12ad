"""Looped models in plain PyTorch, written from the families' descriptions: what the engine's logits are compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.checkpoints.conversion import build_model
from layerskip_models.checkpoints.parameters import HEAD, parameter_shapes, rotary_frequencies
from layerskip_models.checkpoints.weights import ModuleWeights
from layerskip_models.families import FAMILIES, IN_TRANSFORMERS, family_of
from layerskip_models.linear import Layout

LOOPED = tuple(kind for kind in FAMILIES if kind not in IN_TRANSFORMERS)
GATE = "model.early_exit_gate"
_NORMS = {
    "ouro": ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"),
    "nanbeige": ("input_layernorm", None, "post_attention_layernorm", None),
}
"""Before attention, after it, before the MLP, after it."""


class LoopedReference(PreTrainedModel, GenerationMixin):
    """A module with the names of a family's checkpoint, which transformers' `generate` runs without a cache."""

    config_class = PreTrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, shape in parameter_shapes(config).items():
            if name == HEAD and config.tie_word_embeddings:
                continue
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.ModuleList() if part == "layers" else nn.Module())
                module = module.get_submodule(part)
            setattr(module, leaf, nn.Parameter(torch.zeros(shape)))

    def boundary_logits(self, tokens: Sequence[int]) -> list[Tensor]:
        """The logits after each loop, [tokens, vocab]."""
        config: Any = self.config
        weights, size = dict(self.named_parameters()), config.head_dim

        def norm(x: Tensor, name: str | None) -> Tensor:
            if name is None:
                return x
            single = x.float()  # as in transformers, whatever the rest is computed in
            normed = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + config.rms_norm_eps)
            return normed.to(x.dtype) * weights[f"{name}.weight"]

        def linear(x: Tensor, name: str) -> Tensor:
            return x @ weights[f"{name}.weight"].T

        def rotated(heads: Tensor) -> Tensor:
            places = torch.arange(len(tokens), dtype=torch.float64).view(-1, 1, 1)
            shares = torch.arange(0, size, 2, dtype=torch.float64) / size
            angles = places * config.rope_parameters["rope_theta"] ** -shares
            cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
            first, second = heads.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        def attention(x: Tensor, place: str) -> Tensor:
            query, key, value = (linear(x, f"{place}.self_attn.{one}_proj").unflatten(-1, (-1, size)) for one in "qkv")
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (rotated(key), value))
            scores = torch.einsum("qhd,khd->hqk", rotated(query), key) / size**0.5
            ahead = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
            chances = scores.masked_fill(ahead, -torch.inf).softmax(-1)
            return linear(torch.einsum("hqk,khd->qhd", chances, value).flatten(1), f"{place}.self_attn.o_proj")

        def mlp(x: Tensor, place: str) -> Tensor:
            gate, up = linear(x, f"{place}.mlp.gate_proj"), linear(x, f"{place}.mlp.up_proj")
            return linear(F.silu(gate) * up, f"{place}.mlp.down_proj")

        found, x = [], weights["model.embed_tokens.weight"][list(tokens)]
        for _ in range(config.total_ut_steps if config.model_type == "ouro" else config.num_loops):
            for layer in range(config.num_hidden_layers):
                place = f"model.layers.{layer}"
                norms = [None if name is None else f"{place}.{name}" for name in _NORMS[config.model_type]]
                x = x + norm(attention(norm(x, norms[0]), place), norms[1])
                x = x + norm(mlp(norm(x, norms[2]), place), norms[3])
            normed = norm(x, "model.norm")
            found.append(linear(normed, "lm_head" if HEAD in weights else "model.embed_tokens"))
            x = x if getattr(config, "skip_loop_final_norm", False) else normed
        return found

    def forward(self, input_ids: Tensor, attention_mask: object = None, **_: Any) -> CausalLMOutput:
        (tokens,) = input_ids.tolist()
        return CausalLMOutput(logits=self.boundary_logits(tokens)[-1].unsqueeze(0))

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


def write_folder(folder: Path, model: PreTrainedModel, **changes: Any) -> None:
    """A checkpoint in the hub's layout, without a tokenizer; Ouro's with the gate. changes: fields of config.json."""
    config: Any = model.config
    kind, own = config.model_type, config.to_dict()
    auto_map = {"AutoConfig": f"configuration_{kind}.{FAMILIES[kind].architecture}Config"}
    own |= {"auto_map": auto_map, "rope_theta": own.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    if kind == "ouro":
        own |= {"early_exit_threshold": 1.0, "use_sliding_window": False, "sliding_window": None}
        weights |= {f"{GATE}.weight": torch.ones(1, config.hidden_size), f"{GATE}.bias": torch.ones(1)}
    (folder / "config.json").write_text(json.dumps(own | changes), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
