"""Ways in which the weights of a transformers model change between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

from tiny_llama import tiny_llama


def step_of(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[LlamaForCausalLM], None]:
    """One step of an optimiser, after a backward pass."""

    def step(llama: LlamaForCausalLM) -> None:
        ids = torch.tensor([[5, 1, 7, 9, 2, 11]])
        llama(input_ids=ids, labels=ids).loss.backward()
        make(llama.parameters()).step()

    return step


def copy_through_data(llama: LlamaForCausalLM) -> None:
    for parameter, other in zip(llama.parameters(), tiny_llama(dtype=llama.dtype, seed=4).parameters()):
        parameter.data.copy_(other)


def add_through_data(llama: LlamaForCausalLM) -> None:
    for parameter in llama.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, dtype=parameter.dtype)


def merge_an_adapter(llama: LlamaForCausalLM) -> None:
    """Rank 1, into one matrix, through `.data` as LoRA's merge does."""
    weight = llama.model.layers[0].mlp.down_proj.weight
    one, other = (torch.randn(size, dtype=weight.dtype) for size in weight.shape)
    weight.data += 3 * torch.outer(one, other)


def scale_the_head(llama: LlamaForCausalLM) -> None:
    """Every logit, or in a tied model the embedding too."""
    llama.lm_head.weight.data *= torch.linspace(0.1, 3, llama.config.vocab_size, dtype=llama.dtype)[:, None]


def new_storage(llama: LlamaForCausalLM) -> None:
    llama.model.layers[1].self_attn.o_proj.weight.data = -3 * llama.model.layers[1].self_attn.o_proj.weight.data


def new_module(llama: LlamaForCausalLM) -> None:
    old = llama.model.layers[0].mlp.up_proj
    fresh = nn.Linear(old.in_features, old.out_features, bias=False, dtype=llama.dtype)
    llama.model.layers[0].mlp.up_proj = fresh


def add_a_bias(llama: LlamaForCausalLM) -> None:
    linear = llama.model.layers[3].mlp.down_proj
    linear.bias = nn.Parameter(torch.linspace(-3, 3, linear.out_features, dtype=llama.dtype))


def tie_or_untie(llama: LlamaForCausalLM) -> None:
    embedding, tied = llama.model.embed_tokens.weight, llama.lm_head.weight is llama.model.embed_tokens.weight
    llama.lm_head.weight = nn.Parameter(torch.randn_like(embedding)) if tied else embedding


UPDATES: dict[str, Callable[[LlamaForCausalLM], object]] = {
    "data.copy_": copy_through_data,
    "data +=": add_through_data,
    "fused AdamW": step_of(lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True)),
    "foreach SGD": step_of(lambda parameters: torch.optim.SGD(parameters, lr=0.5, foreach=True)),
    "load_state_dict": lambda llama: llama.load_state_dict(tiny_llama(dtype=llama.dtype, seed=4).state_dict()),
    "adapter": merge_an_adapter,
    "head": scale_the_head,
    "new storage": new_storage,
    "new module": new_module,
    "a bias": add_a_bias,
    "a head tied or untied": tie_or_untie,
    "rotary frequencies": lambda llama: llama.model.rotary_emb.inv_freq.mul_(0.1),
    "rotary scaling": lambda llama: setattr(llama.model.rotary_emb, "attention_scaling", 2.0),
}
