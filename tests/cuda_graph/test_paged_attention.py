"""Captured passes whose attention reads the length from the device: on a CPU, by a reference of PyTorch's operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig

import selfspec.engine.runners.cuda_graph.runner
from flash_reference import flash_attention_on_cpu
from fuzz_models import random_model
from layerskip_models import from_transformers
from layerskip_models.kv_cache import KVCache
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.calibrate import calibrate
from selfspec.engine.runners.cuda_graph import paged_attention
from selfspec.engine.runners.cuda_graph.buffers import StaticPass
from selfspec.engine.runners.cuda_graph.paged_attention import EXPECTED_SCHEMA, PAGE, Pages, attends_by_pages
from selfspec.engine.runners.cuda_graph.runner import captured_length
from selfspec.engine.runners.cuda_graph.streams import NoStreams
from test_cuda_paths import SHAPES
from tiny_llama import VOCAB_SIZE, reference_greedy, tiny_llama

PROMPT = [5, 1, 7]
LONG = [(7 * i * i + 3) % VOCAB_SIZE for i in range(PAGE - 6)]  # the text goes from one page into the next
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_captures")]


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The operator on the CPU, for the dtypes of tests. Yields the rows of its calls."""
    monkeypatch.setattr(paged_attention, "_DTYPES", {"cpu": (torch.float64, torch.float32, torch.bfloat16)})
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.runner, "SMALLEST_CACHE", PAGE)
    with flash_attention_on_cpu() as calls:
        yield calls


def tiny(**options: Any) -> LlamaForCausalLM:
    return tiny_llama(
        **{"dtype": torch.float64, "late_scale": 0.6, "seed": 3, "max_position_embeddings": 512, **options}
    )


def windowed() -> Any:
    """Of a family with sliding windows, float64."""
    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, sliding_window=5, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return random_model(config, late_scale=0.4, sharpness=1.5, seed=1)


def test_the_operator_is_the_one_that_is_known_here() -> None:
    """If this fails PyTorch has changed it: see what is new, then change the call and the text."""
    assert str(torch.ops.aten._flash_attention_forward.default._schema) == EXPECTED_SCHEMA


def test_pages_are_the_cache_s_own_memory() -> None:
    cache = KVCache(from_transformers(tiny(heads=4, kv_heads=2), layout="plain"), 2 * PAGE)
    pages = Pages.of(cache)
    for layer in range(4):
        for paged_memory, memory in ((pages.keys, cache.keys), (pages.values, cache.values)):
            assert paged_memory[layer].data_ptr() == memory[layer].data_ptr()
            assert paged_memory[layer].shape == (2, PAGE, 2, 8)
    cache.keys[3, 1, :, PAGE + 4] = 7.0
    cache.values[2, 0, 9] = 8.0
    assert (pages.keys[3][1, 4, 1] == 7.0).all()
    assert (pages.values[2][0, 9, 0] == 8.0).all()
    with pytest.raises(ValueError, match="not whole pages of 256"):
        Pages.of(KVCache(from_transformers(tiny(), layout="plain"), PAGE + 1))


def test_caches_are_whole_pages() -> None:
    assert captured_length(100, 64, paged=True) == PAGE
    assert captured_length(5000, 6000, paged=True) == 24 * PAGE
    assert captured_length(100, 8192, paged=True) == 4096


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 5])
def test_rows_are_aligned_at_the_end_of_the_text(heads: int, kv_heads: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(kv_heads, 8, 2 * PAGE, generator=generator).mT.contiguous().mT
    values = torch.randn(kv_heads, 2 * PAGE, 8, generator=generator)
    pages = Pages([keys], [values])
    for rows, length in ((1, 1), (3, 3), (1, 300), (4, 258)):
        query = torch.randn(rows, heads, 8, generator=generator)
        used = torch.tensor([length], dtype=torch.int32)
        found = pages.attend(0, query, pages.bounds(rows), used, window)
        expected = paged_attention._expected(query, keys, values, length, window)
        torch.testing.assert_close(found, expected)


# The text


def test_captured_texts_are_the_model_s_own(paged: list[int]) -> None:
    """By every policy, on the same captures."""
    llama = tiny()
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured")
    expected = reference_greedy(llama, PROMPT, max_new_tokens=25)
    for policy in (name for name in EVERY_POLICY if "pacer" not in name and not name.startswith("copy")):
        paged.clear()
        result = engine.generate(PROMPT, max_new_tokens=25, policy=named_policy(policy, 2, engine.model))
        assert result.new_tokens == expected, policy
        assert result.stats.runner == "captured"
        assert max(paged) > 1


@pytest.mark.parametrize("make", [lambda: tiny(heads=4, kv_heads=2), windowed], ids=["grouped heads", "windows"])
def test_texts_that_go_into_the_next_page(make: Callable[[], Any], paged: list[int]) -> None:
    llama = make()
    expected = reference_greedy(llama, LONG, max_new_tokens=15)
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured")
    for policy in ("ar", "ls:2-4", "dv:2", "auto:cost=layers"):
        result = engine.generate(LONG, max_new_tokens=15, policy=policy)
        assert (result.new_tokens, result.stats.runner) == (expected, "captured")
    assert paged


@pytest.mark.usefixtures("paged")
def test_texts_in_bfloat16_pass_the_comparison_with_eager_rounds() -> None:
    llama = tiny(dtype=torch.bfloat16, heads=4, kv_heads=2)
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in ("ar", "ls:2-4"):
            assert engine.generate(PROMPT, max_new_tokens=20, policy=policy).stats.runner == "captured"


@pytest.mark.usefixtures("paged")
def test_a_cache_without_room_for_added_rows() -> None:
    """Drafts of 9 take a capture of 16 rows, of which the last would lie behind the cache."""
    llama = tiny(max_position_embeddings=PAGE)
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured")
    result = engine.generate(LONG[:-20], max_new_tokens=26, policy="ls:2-9")
    assert result.new_tokens == reference_greedy(llama, LONG[:-20], max_new_tokens=26)
    assert (result.stats.runner, len(LONG[:-20]) + 26) == ("captured", PAGE)


@pytest.mark.usefixtures("paged")
def test_added_rows_neither_harm_nor_matter() -> None:
    """Three rows in a capture of four: what lies in the fourth's place is nothing, and no committed row is touched."""
    model = from_transformers(tiny(), layout="plain")
    text = torch.tensor([3, 8, 1, 0, 22, 5, 7])
    eager, cache = KVCache(model, 16), KVCache(model, PAGE)
    cache.keys.zero_()
    cache.values.zero_()
    with torch.inference_mode():
        expected = model.run_layers(model.embed(text), 0, 4, eager)
        model.run_layers(model.embed(text[:4]), 0, 4, cache)
        passes = StaticPass(model, cache, 4, NoStreams())
        passes.tokens[:3] = text[4:]
        for row in range(3):
            passes.place(row, row + 1, 4)
            passes.layers(0, 2, 1, None, None)
        passes.hidden[3] = torch.nan
        passes.place(0, 3, 4)
        passes.layers(2, 4, 4, None, None)
        torch.testing.assert_close(passes.hidden[:3], expected[4:])
        assert passes.hidden.isfinite().all()
        torch.testing.assert_close(cache.values[:, :, :7], eager.values[:, :, :7])
        torch.testing.assert_close(cache.keys[..., :7], eager.keys[..., :7])
        assert cache.values.isfinite().all()
        assert not cache.values[:, :, 8:].any()


# Captures


def test_lengths_share_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for by_pages in (True, False):
        monkeypatch.setattr(paged_attention, "_DTYPES", {"cpu": (torch.float64,)} if by_pages else {})
        with flash_attention_on_cpu():
            model = from_transformers(tiny(), layout="plain")
            assert attends_by_pages(model) is by_pages
            engine = SelfSpecGenerator(model, policy="ls:2-3", runner="captured")
            counts[by_pages] = engine.warm_up(max_length=256)[0]
            for prompt in (PROMPT, LONG[:60]):
                assert engine.generate(prompt, max_new_tokens=20).stats.num_captures == 0
    assert 0 < 2 * counts[True] < counts[False]


@pytest.mark.usefixtures("paged")
def test_calibration_times_it() -> None:
    assert len(calibrate(from_transformers(tiny(), layout="plain"), "captured").layer_seconds) == 13


# Where it is used


def test_masks_are_used_where_the_operator_is_not_for_the_model(
    paged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attends_by_pages(from_transformers(tiny(), layout="plain"))
    odd = from_transformers(tiny(head_dim=4), layout="plain")
    paged.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not attends_by_pages(odd)
        monkeypatch.setattr(paged_attention, "EXPECTED_SCHEMA", "another")
        assert not attends_by_pages(from_transformers(tiny(), layout="plain"))
        monkeypatch.undo()
        assert not attends_by_pages(from_transformers(tiny(), layout="plain"))
    assert not paged


@pytest.mark.parametrize("fault", ["error", "wrong", "NaN"])
@pytest.mark.usefixtures("paged")
def test_a_trial_that_fails_costs_one_warning(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Pages.attend

    def faulty(self: Pages, layer: int, query: Tensor, *rest: Any) -> Tensor:
        if fault == "error":
            raise NotImplementedError("not here")
        return attend(self, layer, query.flip(0), *rest) * (torch.nan if fault == "NaN" else 1.1)

    monkeypatch.setattr(Pages, "attend", faulty)
    llama = tiny()
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured")
    expected = reference_greedy(llama, PROMPT, max_new_tokens=15)
    with pytest.warns(RuntimeWarning, match=r"masks instead of flash attention: (NotImpl|1 rows of 3)") as seen:
        for policy in ("ar", "ls:2-3"):
            result = engine.generate(PROMPT, max_new_tokens=15, policy=policy)
            assert result.new_tokens == expected
            assert result.stats.runner == "captured"
    assert len(seen) == 1
