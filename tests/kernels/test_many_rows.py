"""Rows of several texts in one pass: numbers and caches are those of each text's own pass, and the weights are read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batched_runs import Wish, model_of, run_together
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kernels.library import Step
from layerskip_models.kernels.native_forward import STEP_ROWS
from layerskip_models.kernels.native_layers import NativeLayers
from layerskip_models.kernels.native_linear import MAX_ROWS, NativeLinear
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator
from test_cuda_paths import as_on_cuda
from test_native import RUNNABLE, drawn, every_variant, needs_native, use
from tiny_llama import tiny_llama, tiny_tokenizer

Call = tuple[int, int, int, int, bool]
"""Texts, rows, first layer, last layer + 1, whether the head was looked at."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"seed": 2},
    {"seed": 3, "heads": 6, "kv_heads": 3, "hidden_size": 24, "head_dim": 8, "attention_bias": True},
    {"seed": 4, "heads": 4, "kv_heads": 4, "hidden_size": 72, "head_dim": 18, "intermediate_size": 45},
)


@cache
def cached_native(variant: str, shape: int) -> LayerSkipModel:
    llama = tiny_llama(dtype=torch.bfloat16, **{"max_position_embeddings": 256, **SHAPES[shape]})
    with use(variant):
        return from_transformers(llama.float(), layout="native")


@cache
def operator_model(shape: int, path: str) -> LayerSkipModel:
    """In float64, with attention as on a CPU, by the kernels that 16 bits take there, or as on CUDA."""
    llama = tiny_llama(dtype=torch.float64, **{"max_position_embeddings": 256, **SHAPES[shape]})
    if path == "CUDA":
        return as_on_cuda(llama)
    model = from_transformers(llama, layout="plain")
    model.operators._unfused = path == "CPU"
    return model


class Pass:
    """Random rows of random texts through a random range of layers, and two equal sets of caches to run them on."""

    def __init__(self, model: LayerSkipModel, seed: int, max_texts: int, max_rows: int) -> None:
        random = Random(seed)
        self.model = model
        self.sizes = [random.choice([1, 1, random.randint(1, max_rows)]) for _ in range(random.randint(1, max_texts))]
        positions = [random.choice([0, random.randint(0, 60)]) for _ in self.sizes]
        self.start, self.stop = sorted(random.choices(range(model.num_layers + 1), k=2))  # none as well
        self.hidden = drawn(sum(self.sizes), model.hidden_size, seed=seed).to(model.dtype)
        self.caches: list[list[KVCache]] = [[], []]
        for position, size in zip(positions, self.sizes):
            room = position + size + random.choice([0, 1, 30])
            keys, values = drawn(2, model.num_layers, model.num_kv_heads, room, model.head_dim, seed=room).to(
                model.dtype
            )
            for caches in self.caches:
                caches.append(KVCache(model, room))
                caches[-1].keys.copy_(keys.mT)
                caches[-1].values.copy_(values)
                caches[-1].declare(position)

    def run(self, watched: bool) -> list[tuple[Tensor, dict[int, Tensor]]]:
        """All at once, then row by row: the rows, and what was seen of every layer."""
        model, (together, alone) = self.model, self.caches
        each = [cache for cache, size in zip(alone, self.sizes) for _ in range(size)]
        seen: list[dict[int, Tensor]] = [{} for _ in range(1 + len(each))]
        watch: Callable[[int], Any] = lambda index: seen[index].__setitem__ if watched else None  # noqa: E731
        rows = [*zip(together, self.sizes)]
        found = model.run_layers(self.hidden, self.start, self.stop, rows, watch(0))
        parts = [
            model.run_layers(part, self.start, self.stop, cache, watch(1 + index))
            for index, (part, cache) in enumerate(zip(self.hidden.split(1), each))
        ]
        joined = {layer: torch.cat([one[layer] for one in seen[1:]]) for layer in seen[1]}
        return [(found, seen[0]), (torch.cat(parts), joined)]

    def compare(self, equal: Callable[[Tensor, Tensor], Any], watched: bool) -> None:
        (found, seen), (expected, own) = self.run(watched)
        equal(found, expected)
        assert self.start < self.stop or torch.equal(found, self.hidden)
        assert [*seen] == [*own] == [*range(self.start + 1, self.stop + 1)] * watched
        for layer, states in seen.items():
            equal(states, own[layer])
        for one, other in zip(*self.caches):
            equal(one.values, other.values)  # to the last position, written or not
            equal(one.keys, other.keys)
            assert one._rows == other._rows


def equal_bits(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected)


def nearly_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@needs_native
@every_variant
@given(
    seed=st.integers(0, 2**32),
    shape=st.integers(0, len(SHAPES) - 1),
    threads=st.integers(1, 3),
    most=st.sampled_from([(20, 40), (20, 1), (3, 150)]),
    watched=st.booleans(),
)
@settings(max_examples=80)
def test_a_pass_over_several_texts_is_their_rows_one_by_one_bit_for_bit(
    variant: str, seed: int, shape: int, threads: int, most: tuple[int, int], watched: bool
) -> None:
    with torch.inference_mode(), on_threads(threads):
        Pass(cached_native(variant, shape), seed, *most).compare(equal_bits, watched)


@given(
    seed=st.integers(0, 2**32),
    shape=st.integers(0, len(SHAPES) - 1),
    most=st.sampled_from([(6, 20), (12, 1), (3, 60)]),
    watched=st.booleans(),
    path=st.sampled_from(["CPU", "CPU in 16 bits", "CUDA"]),
)
@settings(max_examples=80)
def test_a_pass_over_several_texts_is_their_rows_one_by_one_on_operators(
    seed: int, shape: int, most: tuple[int, int], watched: bool, path: str
) -> None:
    with torch.inference_mode():
        Pass(operator_model(shape, path), seed, *most).compare(nearly_equal, watched)


# How often weights are read


@needs_native
def test_more_rows_than_fit_a_call_are_run_in_as_few_calls_as_can_be() -> None:
    """A text's rows may be in two of them."""
    model = cached_native(RUNNABLE[0], 0)
    sizes = [MAX_ROWS - 5, 1, 1, 30, 100]
    with native_calls(model) as calls:
        model.run_layers(drawn(sum(sizes), model.hidden_size), 0, 4, [(KVCache(model, size), size) for size in sizes])
    assert [call[:2] for call in calls] == [(4, MAX_ROWS), (2, sum(sizes) - MAX_ROWS)]


@contextmanager
def native_calls(model: LayerSkipModel) -> Iterator[list[Call]]:
    native = model.backend
    assert isinstance(native, NativeLayers)
    calls: list[Call] = []
    original = native.run_step

    def counted(address: int, threads: int) -> int:
        step = Step.from_address(address)
        calls.append((step.num_spans, step.rows, step.first, step.first + step.count, bool(step.head)))
        return original(address, threads)

    native.run_step = counted
    try:
        yield calls
    finally:
        native.run_step = original


def rounds_of(texts: Sequence[Wish], monkeypatch: pytest.MonkeyPatch) -> list[list[Call]]:
    """What was called in each step of an engine whose texts have all read their prompts, and how often the head was."""
    model = model_of("native")
    generator = SelfSpecGenerator(model, tiny_tokenizer())
    heads: list[int] = []
    for name in ("logits", "draft_logits", "choices", "draft_choices"):
        original = getattr(model, name)
        monkeypatch.setattr(
            model, name, lambda x, *rest, original=original: heads.append(x.shape[0]) or original(x, *rest)
        )
    found: list[list[Call]] = []
    with native_calls(model) as calls:

        def watch(engine: Any, progress: Any) -> None:
            if all(one.record is not None for one in progress):
                found.append([*calls, *((0, rows, 4, 4, True) for rows in heads)])
            calls.clear()
            heads.clear()

        run_together(generator, texts, watch)
    return found


LS_OF_20 = [*[(20, 20, 0, 2, True)] * 4, (20, 20, 0, 2, False), (20, 100, 2, 4, False), (0, 100, 4, 4, True)]
LS_OF_5 = [*[(5, 5, 0, 2, True)] * 4, (5, 5, 0, 2, False), (5, 25, 2, 4, True)]
SAMPLED = {"do_sample": True, "seed": 1}


@needs_native
@pytest.mark.parametrize(
    ("count", "policy", "sampling", "calls"),
    [
        (5, "ar", {}, [(5, 5, 0, 4, True)]),
        # Each draft step is one call, and so is verification; before it the last tokens' first layers, which no draft ran.
        (5, "ls:{E}-4", {}, LS_OF_5),
        (5, "ls:{E}-4", SAMPLED, LS_OF_5),
        (20, "ls:{E}-4", {}, LS_OF_20),  # more rows than a step has room for: the head by itself
    ],
)
def test_a_step_of_several_texts_is_one_call(
    count: int, policy: str, sampling: dict[str, Any], calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one joins first of all that are read: so all are past their prompts from the second step on.
    assert 25 < STEP_ROWS < 100 <= MAX_ROWS
    options = {"max_new_tokens": 30, **sampling}
    texts = [Wish(prompt=[3 + index, 1], policy=policy, exit_layer=2, options=options) for index in range(count)]
    for round_calls in rounds_of(texts, monkeypatch)[1:5]:
        assert round_calls == calls


@needs_native
def test_texts_of_several_exit_layers_share_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two draft steps reads 3 layers once, and what verifies reads all 4 once, whatever the texts' exit layers."""
    options = {"max_new_tokens": 30}
    texts = [
        Wish(prompt=[3 + index, 1], policy="ls:{E}-2", exit_layer=1 + index % 3, options=options) for index in range(6)
    ]
    for round_calls in rounds_of(texts, monkeypatch)[1:5]:
        assert sum(last - first for _, _, first, last, _ in round_calls) == 2 * 3 + 4


@needs_native
def test_a_linear_reads_its_weight_once_for_all_rows() -> None:
    linear = NativeLinear(drawn(40, 16))
    with patch.object(linear, "_run", wraps=linear._run) as run:
        linear(drawn(MAX_ROWS, 16))
    assert run.call_count == 1
