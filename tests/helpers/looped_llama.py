"""Looped models made of tiny Llamas, in whose texts drafts of the first loop are often accepted, and often not."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.linear import Layout
from selfspec import SelfSpecGenerator
from tiny_llama import VOCAB_SIZE, tiny_llama, tiny_tokenizer


@cache
def looped_llama(
    layout: Layout,
    num_loops: int = 4,
    loop_layers: int = 2,
    vocab_size: int = VOCAB_SIZE,
    normed: bool = False,
    **config: Any,
) -> LayerSkipModel:
    """normed: with the final norm between loops. On our kernels in float32, on PyTorch's operators in float64."""
    dtype = torch.float64 if layout == "plain" else torch.float32
    shape = {"heads": 4, "kv_heads": 2, "vocab_size": vocab_size, **config}
    llama = tiny_llama(num_layers=loop_layers, late_scale=0.02, dtype=dtype, seed=21, **shape)
    with torch.no_grad():
        for part in (llama.model.layers[0].self_attn.o_proj, llama.model.layers[0].mlp.down_proj):
            part.weight.mul_(0.1)  # it runs in every loop
    model = copy.copy(from_transformers(llama, layout=layout))
    model.num_loops, model.loop_layers = num_loops, loop_layers
    model.num_layers = num_loops * loop_layers
    model.sliding_windows *= num_loops
    model.layer_devices *= num_loops
    first, *others = model.layers
    model._set_layers([replace(first, entry_norm=model.final_norm if normed else None), *others])
    return model


def looped_generator(layout: Layout, prefix_cache: int | None = None, **config: Any) -> SelfSpecGenerator:
    """Of the model with norms between its 4 loops of 2 layers."""
    return SelfSpecGenerator(looped_llama(layout, normed=True, **config), tiny_tokenizer(), prefix_cache=prefix_cache)
