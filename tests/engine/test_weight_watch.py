"""Updated weights of a transformers model are noticed, however they were written. `test_as_built` has what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from selfspec import SelfSpecGenerator
from selfspec.engine import model_source
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [5, 1, 7]


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
    weight.data += (
        3 * torch.randn(weight.shape[0], 1, dtype=weight.dtype) @ torch.randn(1, weight.shape[1], dtype=weight.dtype)
    )


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


def write_the_rotary_frequencies(llama: LlamaForCausalLM) -> None:
    llama.model.rotary_emb.inv_freq.mul_(0.1)


def scale_the_rotary_embedding(llama: LlamaForCausalLM) -> None:
    llama.model.rotary_emb.attention_scaling = 2.0


UPDATES: dict[str, Callable[[LlamaForCausalLM], None]] = {
    "data.copy_": copy_through_data,
    "data +=": add_through_data,
    "fused AdamW": step_of(lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True)),
    "foreach SGD": step_of(lambda parameters: torch.optim.SGD(parameters, lr=0.5, foreach=True)),
    "load_state_dict": lambda llama: llama.load_state_dict(tiny_llama(dtype=llama.dtype, seed=4).state_dict()) and None,
    "adapter": merge_an_adapter,
    "head": scale_the_head,
    "new storage": new_storage,
    "new module": new_module,
    "a bias": add_a_bias,
    "a head tied or untied": tie_or_untie,
    "rotary frequencies": write_the_rotary_frequencies,
    "rotary scaling": scale_the_rotary_embedding,
}


@cache
def first_text(tied: bool) -> list[int]:
    llama = tiny_llama(dtype=torch.float64, seed=3, tie_word_embeddings=tied)
    return reference_greedy(llama, PROMPT, max_new_tokens=12)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", UPDATES)
def test_the_next_call_runs_on_updated_weights(name: str, tied: bool) -> None:
    torch.manual_seed(0)
    llama = tiny_llama(dtype=torch.float64, seed=3, tie_word_embeddings=tied)
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    first = engine.generate(PROMPT, max_new_tokens=12).new_tokens
    assert first == first_text(tied)
    UPDATES[name](llama)
    changed = reference_greedy(llama, PROMPT, max_new_tokens=12)
    assert changed != first
    assert engine.generate(PROMPT, max_new_tokens=12).new_tokens == changed


def test_unchanged_weights_are_not_copied_again() -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    model = engine.model
    for _ in range(5):
        engine.generate(PROMPT, max_new_tokens=20)
        llama(torch.tensor([PROMPT]))
    assert engine.model is model


def test_refresh_copies_at_once() -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    model = engine.model
    llama.model.embed_tokens.weight.data[PROMPT[-1]] *= -2
    engine.refresh()
    assert engine.model is not model
    expected = reference_greedy(llama, PROMPT, max_new_tokens=20)
    assert engine.generate(PROMPT, max_new_tokens=20).new_tokens == expected


def test_a_large_sample_is_spread_over_rows_and_columns() -> None:
    numbers = torch.arange(2048 * 1024)
    sample = model_source._sampled(numbers)
    assert len(sample) == model_source._SAMPLES
    assert len({int(n) // 1024 for n in sample}) == len({int(n) % 1024 for n in sample}) == model_source._SAMPLES
    assert int(sample[-1]) // 1024 > 1900


def test_a_model_that_changes_its_dtype() -> None:
    """Policies with measured costs, or networks of their own, are made anew."""
    llama = tiny_llama(dtype=torch.float32, seed=3)
    engine = SelfSpecGenerator(llama, policy="auto:cost=layers")
    engine.generate(PROMPT, max_new_tokens=8)
    before = engine.policy
    llama.double()
    expected = reference_greedy(llama, PROMPT, max_new_tokens=20)
    assert engine.generate(PROMPT, max_new_tokens=20).new_tokens == expected
    assert engine.model.dtype == torch.float64
    assert engine.policy is not before
