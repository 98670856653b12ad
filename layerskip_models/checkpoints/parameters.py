"""Names and shapes of a model's parameters, and its rotary frequencies, as transformers has them.

transformers' own classes would do, but importing them takes longer than reading a small checkpoint: they bring PyTorch's
compiler with them. tests/models/test_families.py compares every family with what transformers builds.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerskip_models.families import family_of, head_dim_of
from layerskip_models.text_files import in_a_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by its name. A head is among them even where it is tied to the embedding.

    config: one that `checkpoints.supported` has accepted.
    """
    family, size = family_of(config), head_dim_of(config)
    hidden, inner, vocab_size = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    biased = family.biased(config)
    widths = (queries, keys, keys) if len(family.qkv) == 3 else (queries + 2 * keys,)
    linears = [
        *((f"self_attn.{name}", width, hidden, biased.qkv) for name, width in zip(family.qkv, widths)),
        ("self_attn.o_proj", hidden, queries, biased.output),
        *((f"mlp.{name}", inner * 2 // len(family.gate_up), hidden, biased.mlp) for name in family.gate_up),
        ("mlp.down_proj", hidden, inner, biased.mlp),
    ]
    layer: dict[str, tuple[int, ...]] = {}
    for name, rows, columns, has_bias in linears:
        layer[f"{name}.weight"] = rows, columns
        if has_bias:
            layer[f"{name}.bias"] = (rows,)
    for norm in (family.input_norm, family.post_attention_norm, family.output_norm, family.down_norm):
        if norm is not None:
            layer[f"{norm}.weight"] = (hidden,)
    for norm, width in ((family.query_norm, queries), (family.key_norm, keys)):
        if norm is not None:
            layer[f"self_attn.{norm}.weight"] = (width if family.norms_all_heads else size,)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab_size, hidden), NORM: (hidden,), HEAD: (vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def gate_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a checkpoint of the family may hold beside the model's parameters, by name."""
    gate = family_of(config).gate
    return {} if gate is None else {f"{gate}.weight": (1, config.hidden_size), f"{gate}.bias": (1,)}


def rotary_frequencies(config: Any) -> tuple[Tensor, float]:
    """Return the frequencies that transformers' rotary embedding begins with, and what scales their sines and cosines."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        share = rope.get("partial_rotary_factor", 1.0) if family_of(config).rotates_part else 1.0
        rotated = int(head_dim_of(config) * share)
        # In these steps, of which transformers' bits come.
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float) / rotated)), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return frequencies, float(scaling)


def built_on_meta(config: Any, name: str) -> PreTrainedModel:
    """Let transformers build a configuration's model, without memory. ValueError, of one line, if it builds none."""
    try:
        with torch.device("meta"):
            return family_of(config).model(copy.deepcopy(config))
    except Exception as error:  # of any kind: numbers that don't go together fail anywhere in transformers
        raise ValueError(f"transformers builds no model of the configuration of {name} ({in_a_line(error)})") from error
