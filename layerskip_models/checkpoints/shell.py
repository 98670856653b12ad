"""The parameters of a model under transformers' names, without memory, to be filled from files.

transformers' own classes would do, but importing them takes longer than reading a small checkpoint: they bring PyTorch's
compiler with them. tests/models/test_shell.py compares every family with what transformers builds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from layerskip_models.families import Family, family_of, head_dim_of


class MetaModel(nn.Module):
    """config: one that `checkpoints.supported` has accepted. The parameters are on the meta device, a tied head is one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        padding, vocab_size = getattr(config, "pad_token_id", None), config.vocab_size
        if padding is not None and not -vocab_size <= padding < vocab_size:
            raise ValueError(f"pad_token_id={padding} lies outside the vocabulary of {vocab_size}")
        self.config, self.generation_config = config, None
        self.model = _Decoder(config, family_of(config))
        self.lm_head = _Matrix(vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


class RotaryFrequencies:
    """The frequencies that transformers' rotary embedding begins with, and what it scales their sines and cosines by."""

    def __init__(self, config: Any) -> None:
        rope = config.rope_parameters
        self.rope_type = rope["rope_type"]
        self.attention_scaling = 1.0
        if self.rope_type == "default":
            share = rope.get("partial_rotary_factor", 1.0) if family_of(config).rotates_part else 1.0
            rotated = int(head_dim_of(config) * share)
            # In these steps, of which transformers' bits come.
            self.inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float) / rotated))
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            self.inv_freq, self.attention_scaling = ROPE_INIT_FUNCTIONS[self.rope_type](config)
        self.original_inv_freq = self.inv_freq

    def to(self, device: torch.device) -> RotaryFrequencies:
        self.inv_freq = self.original_inv_freq = self.inv_freq.to(device)
        return self


class _Decoder(nn.Module):
    def __init__(self, config: Any, family: Family) -> None:
        super().__init__()
        self.embed_tokens = _Matrix(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([_Layer(config, family) for _ in range(config.num_hidden_layers)])
        self.norm = _Norm(config.hidden_size)
        self.rotary_emb = RotaryFrequencies(config)


class _Layer(nn.Module):
    def __init__(self, config: Any, family: Family) -> None:
        super().__init__()
        size, hidden, inner = head_dim_of(config), config.hidden_size, config.intermediate_size
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        biased = family.biased(config)
        attention, mlp = nn.Module(), nn.Module()
        widths = (queries, keys, keys) if len(family.qkv) == 3 else (queries + 2 * keys,)
        for name, width in zip(family.qkv, widths):
            attention.add_module(name, _Matrix(width, hidden, biased.qkv))
        attention.add_module("o_proj", _Matrix(hidden, queries, biased.output))
        for name in family.gate_up:
            mlp.add_module(name, _Matrix(inner * 2 // len(family.gate_up), hidden, biased.mlp))
        mlp.add_module("down_proj", _Matrix(hidden, inner, biased.mlp))
        if family.query_norm is not None and family.key_norm is not None:
            attention.add_module(family.query_norm, _Norm(queries if family.norms_all_heads else size))
            attention.add_module(family.key_norm, _Norm(keys if family.norms_all_heads else size))
        self.self_attn, self.mlp = attention, mlp
        for norm in (family.input_norm, family.post_attention_norm, family.output_norm, family.down_norm):
            if norm is not None:
                self.add_module(norm, _Norm(hidden))


class _Matrix(nn.Module):
    """A linear or an embedding, [out, in]."""

    def __init__(self, out: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _parameter(out, width)
        self.bias = _parameter(out) if bias else None


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _parameter(width)


def _parameter(*shape: int) -> nn.Parameter:
    value: Tensor = torch.empty(shape, device="meta", dtype=torch.float32)
    return nn.Parameter(value, requires_grad=False)
