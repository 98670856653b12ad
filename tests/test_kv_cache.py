"""The KV cache against a list of rows, as a state machine, and inside the engine against a fresh forward pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted_policies import ScriptedExit, StopAtTokens, StopBelow
from tiny_llama import CONTEXT, VOCAB_SIZE, full_logits, request_for, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM

import selfspec.passes
from layerskip_models import LayerSkipModel, from_transformers
from policies import Policy
from selfspec.decoding import Decoding
from selfspec.draft import Draft
from selfspec.graphs.captured_runner import CapturedRunner
from selfspec.kv_cache import KVCache

NUM_LAYERS = 3
LAYERS = from_transformers(tiny_llama(num_layers=NUM_LAYERS, dtype=torch.float64, seed=8), layout="plain")


def fresh_rows(model: LayerSkipModel, tokens: list[int]) -> KVCache:
    """A cache filled by one pass over a whole text."""
    cache = KVCache(model, max(len(tokens), 1))
    if tokens:
        model.run_layers(model.embed(torch.tensor(tokens)), 0, model.num_layers, cache, 0)
    return cache


def rows_of(cache: KVCache, length: int) -> Tensor:
    """Keys and values of the first positions: [2, layers, kv_heads, length, head_dim]."""
    return torch.stack([cache.keys.mT[:, :, :length], cache.values[:, :, :length]])


def assert_same_rows(cache: KVCache, expected: KVCache, length: int) -> None:
    torch.testing.assert_close(rows_of(cache, length), rows_of(expected, length), rtol=0, atol=1e-10)


class CacheMachine(RuleBasedStateMachine):
    """Rows are appended to all layers, or to a lower range first; rolled back; overwritten. The model is a list of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(LAYERS, CONTEXT)
        self.tokens: list[int] = []

    @precondition(lambda self: len(self.tokens) < CONTEXT - 6)
    @rule(block=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6))
    def append(self, block: list[int]) -> None:
        LAYERS.run_layers(LAYERS.embed(torch.tensor(block)), 0, NUM_LAYERS, self.cache, len(self.tokens))
        self.tokens += block
        self.cache.roll_back(len(self.tokens))

    @precondition(lambda self: len(self.tokens) < CONTEXT - 6)
    @rule(
        block=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
        exit_layer=st.integers(1, NUM_LAYERS - 1),
        kept=st.integers(1, 6),
    )
    def draft_then_verify(self, block: list[int], exit_layer: int, kept: int) -> None:
        """Rows one at a time through the first layers, then all at once through the rest; some are given back."""
        start = len(self.tokens)
        hidden = [
            LAYERS.run_layers(LAYERS.embed_one(token), 0, exit_layer, self.cache, start + i)
            for i, token in enumerate(block)
        ]
        LAYERS.run_layers(torch.cat(hidden), exit_layer, NUM_LAYERS, self.cache, start)
        self.tokens += block[:kept]
        self.cache.roll_back(len(self.tokens))

    @rule(exit_layer=st.integers(1, NUM_LAYERS - 1), token=st.integers(0, VOCAB_SIZE - 1))
    def leave_a_row_behind(self, exit_layer: int, token: int) -> None:
        """A draft that is never kept leaves rubbish behind the text, in its layers."""
        LAYERS.run_layers(LAYERS.embed_one(token), 0, exit_layer, self.cache, len(self.tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.tokens)))
        del self.tokens[length:]
        self.cache.roll_back(length)

    @invariant()
    def holds_the_rows_of_the_text(self) -> None:
        assert self.cache.length == len(self.tokens)
        assert_same_rows(self.cache, fresh_rows(LAYERS, self.tokens), len(self.tokens))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=20)


@pytest.mark.parametrize("length", [-1, 9])
def test_roll_back_refuses_what_it_cannot_hold(length: int) -> None:
    with pytest.raises(ValueError, match=r"\[0, 8\]"):
        KVCache(LAYERS, 8).roll_back(length)


def test_roll_back_moves_nothing() -> None:
    cache = fresh_rows(LAYERS, [1, 2, 3])
    before = rows_of(cache, 3).clone()
    cache.roll_back(1)
    assert torch.equal(rows_of(cache, 3), before)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_window_is_the_cache_itself(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerSkipModel, "transposed_keys", transposed)
    cache = fresh_rows(LAYERS, [1, 2, 3, 4])
    assert cache.keys.is_contiguous() is transposed
    windows = list(cache.window(1, 3, 2, 4))
    assert len(windows) == 2
    for layer, (new_keys, new_values, keys, values) in zip((1, 2), windows):
        assert torch.equal(new_keys, cache.keys[layer].permute(2, 0, 1)[2:4])
        assert torch.equal(new_values, cache.values[layer].transpose(0, 1)[2:4])
        assert torch.equal(keys, cache.keys[layer])
        assert torch.equal(values, cache.values[layer])
        new_keys.zero_()
        new_values.zero_()
        assert not keys[..., 2:].any()
        assert not values[:, 2:].any()
        assert keys[..., :2].all()


def test_size_in_bytes() -> None:
    # 3 layers * 10 rows * (1 key + 1 value head) * 8 numbers * 8 bytes
    assert KVCache(LAYERS, 10).num_bytes == 3 * 10 * 2 * 8 * 8


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.usefixtures("small_captures")
def test_after_every_captured_round_the_cache_equals_a_full_forward(do_sample: bool) -> None:
    """Whatever was launched ahead, dropped or padded: rows 0 .. n-2 of every layer, on one cache for all texts."""
    llama = tiny_llama(dtype=torch.float64, late_scale=0.6, seed=3)
    model = from_transformers(llama, layout="plain")
    cache = KVCache(model, 40)
    runner = CapturedRunner(model, cache)
    discarded = 0
    for stopping in (None, StopBelow(0.4), StopAtTokens(range(0, 24, 2))):
        policy = Policy(ScriptedExit([(1, 4), (1, 3), (3, 2), (None, 0), (None, 0), (2, 5)]), stopping)
        for prompt in ([7], [3, 3, 9, 1]):
            request = request_for(
                model, prompt, seed=1, max_new_tokens=30, do_sample=do_sample, top_k=8 if do_sample else None
            )
            cache.roll_back(0)
            decoding = Decoding(model, cache, request, policy, runner)
            with torch.inference_mode():
                for _ in decoding.run():
                    text = decoding.tokens[0, : decoding.length].tolist()
                    assert cache.length == len(text) - 1
                    assert_same_rows(cache, fresh_rows(model, text), len(text) - 1)
            discarded += decoding.stats.num_discarded_rows
    assert discarded > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_after_every_round_cache_and_logits_equal_a_full_forward(
    do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0 .. n-2 of every layer, and the logits of every row that was verified, whatever was drafted and rejected."""
    llama = tiny_llama(dtype=torch.float64, late_scale=0.6, seed=3)
    model = from_transformers(llama, layout="plain")
    verified: list[tuple[Draft, int, Tensor]] = []
    original = selfspec.passes.verify

    def spy(model: LayerSkipModel, draft: Draft, length: int, *rest: object) -> Tensor:
        hidden = original(model, draft, length, *rest)  # type: ignore[arg-type]
        verified.append((draft, length, model.logits(hidden).clone()))
        return hidden

    monkeypatch.setattr(selfspec.passes, "verify", spy)
    rejected = 0
    for stopping in (None, StopBelow(0.4), StopAtTokens(range(0, 24, 2))):
        policy = Policy(ScriptedExit([(1, 4), (3, 2), (None, 0), (2, 5)]), stopping)
        for prompt in ([7], [3, 3, 9, 1]):
            request = request_for(
                model, prompt, seed=1, max_new_tokens=30, do_sample=do_sample, top_k=8 if do_sample else None
            )
            cache = KVCache(model, len(prompt) + 30)
            decoding = Decoding(model, cache, request, policy)
            with torch.inference_mode():
                for _, record in decoding.run():
                    text = decoding.tokens[0, : decoding.length].tolist()
                    assert cache.length == len(text) - 1
                    assert_same_rows(cache, fresh_rows(model, text), len(text) - 1)
                    if verified:
                        draft, length, logits = verified.pop()
                        expected = full_logits(llama, text[:length] + draft.tokens)[length - 1 :]
                        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
                        assert record is not None
                        rejected += record.num_drafted - record.num_accepted
    assert rejected > 0


def test_a_prepared_model_is_left_alone() -> None:
    """Growing the rotary table does not change the angles of the positions that were there."""
    llama: LlamaForCausalLM = tiny_llama(dtype=torch.float64, seed=8)
    model = from_transformers(llama, layout="plain")
    short = fresh_rows(model, [1, 2, 3])
    KVCache(model, CONTEXT)
    assert_same_rows(fresh_rows(model, [1, 2, 3]), short, 3)
