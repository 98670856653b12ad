"""Updated weights of a transformers model are noticed, however they were written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from selfspec import SelfSpecGenerator
from selfspec.engine import weight_watch
from selfspec.engine.weight_watch import WeightWatch
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


class Numbers(nn.Module):
    """Weights alone, of odd sizes and layouts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(300, 256).to(dtype))
        self.odd = nn.Parameter(torch.randn(7, 33).to(dtype))
        self.vector = nn.Parameter(torch.randn(5).to(dtype))
        self.transposed = nn.Parameter(torch.randn(64, 96).to(dtype).t())
        self.inner = nn.ModuleList([nn.Linear(8, 8, dtype=dtype)])
        self.inner[0].weight = self.matrix  # shared


def set_number(parameter: Tensor, index: int) -> None:
    parameter.data.view(-1)[index] += 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "edit",
    [
        lambda model: set_number(model.matrix, 300 * 256 - 1),
        lambda model: set_number(model.matrix, 12345),
        lambda model: set_number(model.odd, 230),
        lambda model: set_number(model.vector, 3),
        lambda model: set_number(model.transposed.data.t(), 77),
        lambda model: model.matrix.data.copy_(model.matrix.data[[1, 0, *range(2, 300)]]),
        lambda model: model.vector.data.mul_(-1),
    ],
    ids=["last", "inside", "odd", "vector", "transposed", "rows that change places", "signs"],
)
def test_checksums_find_any_edit_once_all_was_looked_at(
    edit: Callable[[Numbers], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 4 kB, and time for all of them: one number, or two rows, is enough."""
    monkeypatch.setattr(weight_watch, "_BLOCK", 512)
    model = Numbers(dtype)
    watch = WeightWatch(model)
    watch.called(1e6)
    assert not watch.changed()
    with torch.no_grad():
        edit(model)
    found = False
    for _ in range(30):  # a clock that jumps may end a turn early
        watch.called(1e6)
        found = found or watch.changed()
    assert found


def test_checksums_go_round_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little time a call: a block now and then, and in the end each of them."""
    monkeypatch.setattr(weight_watch, "_BLOCK", 512)
    watch = WeightWatch(Numbers(torch.float32))
    looked: list[int] = []
    sums = weight_watch._sums

    def noted(block: Tensor) -> Tensor:
        looked.append(block.data_ptr())
        return sums(block)

    monkeypatch.setattr(weight_watch, "_sums", noted)
    for _ in range(10_000):
        watch.called(watch._seconds / weight_watch._SHARE / 2)
        assert not watch.changed()
        if len(looked) >= len(watch._blocks):
            break
    assert set(looked[: len(watch._blocks)]) == {block.data_ptr() for block, _ in watch._blocks}


def test_a_large_sample_is_spread_over_rows_and_columns() -> None:
    numbers = torch.arange(2048 * 1024)
    sample = weight_watch._sampled(numbers)
    assert len(sample) == weight_watch._SAMPLES
    assert len({int(n) // 1024 for n in sample}) == len({int(n) % 1024 for n in sample}) == weight_watch._SAMPLES
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
