"""The KV cache against a list of rows, as a state machine; and prompts that are read into it in passes with small masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from decoding import decode
from layerskip_models import LayerSkipModel, from_transformers, kv_cache
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import piece_end, prefill
from policies import parse_policy
from selfspec.engine.round import read_prompts
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence
from tiny_llama import CONTEXT, VOCAB_SIZE, reference_greedy, request_for, tiny_llama

NUM_LAYERS = 3
LAYERS = from_transformers(tiny_llama(num_layers=NUM_LAYERS, dtype=torch.float64, seed=8), layout="plain")


def fresh_rows(model: LayerSkipModel, tokens: list[int]) -> KVCache:
    cache = KVCache(model, max(len(tokens), 1))
    if tokens:
        model.run_layers(model.embed(torch.tensor(tokens)), 0, model.num_layers, cache)
    return cache


def rows_of(cache: KVCache, length: int) -> Tensor:
    """Keys and values of the first positions: [2, layers, kv_heads, length, head_dim]."""
    return torch.stack([cache.keys.mT[:, :, :length], cache.values[:, :, :length]])


class CacheMachine(RuleBasedStateMachine):
    """Rows are appended to all layers, or to a lower range first; rolled back; overwritten. The model is a list of tokens
    for every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(LAYERS, CONTEXT)
        self.tokens: list[list[int]] = [[] for _ in range(NUM_LAYERS)]

    @property
    def common(self) -> list[int]:
        return min(self.tokens, key=len)

    @property
    def is_even(self) -> bool:
        return all(held == self.tokens[0] for held in self.tokens)

    def run(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        before = hidden.clone()
        out = LAYERS.run_layers(hidden, start, stop, self.cache)
        assert torch.equal(hidden, before)  # the input is left as it was
        return out

    @precondition(lambda self: self.is_even and len(self.common) < CONTEXT - 6)
    @rule(block=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6))
    def append(self, block: list[int]) -> None:
        self.run(LAYERS.embed(torch.tensor(block)), 0, NUM_LAYERS)
        for held in self.tokens:
            held += block

    @precondition(lambda self: self.is_even and len(self.common) < CONTEXT - 6)
    @rule(
        block=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
        exit_layer=st.integers(1, NUM_LAYERS - 1),
        kept=st.integers(0, 6),
    )
    def draft_then_verify(self, block: list[int], exit_layer: int, kept: int) -> None:
        """Rows one at a time through the first layers, then all at once through the rest; some are given back."""
        start = len(self.common)
        hidden = []
        for index, token in enumerate(block):
            hidden.append(self.run(LAYERS.embed(torch.tensor([token])), 0, exit_layer))
            assert self.cache.position(0, exit_layer) == start + index + 1
            assert self.cache.position(exit_layer, NUM_LAYERS) == self.cache.length == start
        self.run(torch.cat(hidden), exit_layer, NUM_LAYERS)
        assert self.cache.length == start + len(block)
        self.cache.roll_back(start + min(kept, len(block)))
        for held in self.tokens:
            held += block[:kept]

    @precondition(lambda self: len(self.tokens[0]) < CONTEXT - 6)
    @rule(exit_layer=st.integers(1, NUM_LAYERS - 1), token=st.integers(0, VOCAB_SIZE - 1))
    def leave_a_row_behind(self, exit_layer: int, token: int) -> None:
        """A draft that is never kept leaves rows behind the text, in its layers."""
        if len({len(held) for held in self.tokens[:exit_layer]}) > 1:
            with pytest.raises(ValueError, match="hold different numbers of rows"):
                self.run(LAYERS.embed(torch.tensor([token])), 0, exit_layer)
            return
        self.run(LAYERS.embed(torch.tensor([token])), 0, exit_layer)
        for held in self.tokens[:exit_layer]:
            held.append(token)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.common)))
        self.cache.roll_back(length)
        for held in self.tokens:
            del held[length:]

    @rule(block=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6))
    def declare(self, block: list[int]) -> None:
        """Somebody else writes all the rows, and says how many there are."""
        other = fresh_rows(LAYERS, block)
        self.cache.keys[..., : len(block)] = other.keys[..., : len(block)]
        self.cache.values[:, :, : len(block)] = other.values[:, :, : len(block)]
        self.cache.declare(len(block))
        self.tokens = [list(block) for _ in range(NUM_LAYERS)]

    @rule(extra=st.integers(1, 3))
    def ask_for_too_much(self, extra: int) -> None:
        """Nothing is changed by what does not fit; a rollback goes no further than every layer's rows."""
        length = len(self.common)
        for wrong in (length + extra, -extra):
            with pytest.raises(ValueError, match=rf"\[0, {length}\]"):
                self.cache.roll_back(wrong)
        for wrong in (CONTEXT + extra, -extra):
            with pytest.raises(ValueError, match=rf"\[0, {CONTEXT}\]"):
                self.cache.declare(wrong)
        held = len(self.tokens[0])
        rows = torch.zeros(CONTEXT - held + extra, LAYERS.hidden_size, dtype=torch.float64)
        with pytest.raises(ValueError, match=f"from position {held} on do not fit into a cache of {CONTEXT}"):
            self.run(rows, 0, 1)

    @invariant()
    def holds_the_rows_of_the_text(self) -> None:
        assert self.cache.length == len(self.common)
        for start in range(NUM_LAYERS):
            for stop in range(start + 1, NUM_LAYERS + 1):
                lengths = {len(held) for held in self.tokens[start:stop]}
                if len(lengths) == 1:
                    assert self.cache.position(start, stop) == lengths.pop()
                else:
                    with pytest.raises(ValueError, match="hold different numbers of rows"):
                        self.cache.position(start, stop)
        for layer, held in enumerate(self.tokens):
            expected = rows_of(fresh_rows(LAYERS, held), len(held))[:, layer]
            torch.testing.assert_close(rows_of(self.cache, len(held))[:, layer], expected, rtol=0, atol=1e-10)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=20)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (-1, 2), (2, 2), (2, 1), (3, 4)])
def test_there_is_no_place_in_layers_that_do_not_exist(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"layers \[{start}, {stop}\) of 3"):
        KVCache(LAYERS, 8).position(start, stop)


def test_long_caches_ask_for_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MiB of float64 are 32,768 positions of a head of 8 numbers."""
    asked: list[Tensor] = []
    monkeypatch.setattr(kv_cache, "expect_large_pages", asked.append)
    KVCache(LAYERS, 32767)
    assert not asked
    cache = KVCache(LAYERS, 32768)
    assert [memory.data_ptr() for memory in asked] == [cache.keys.data_ptr(), cache.values.data_ptr()]
    # 3 layers * 32768 rows * (1 key + 1 value head) * 8 numbers * 8 bytes
    assert cache.num_bytes == 3 * 32768 * 2 * 8 * 8


def test_a_prepared_model_is_left_alone() -> None:
    """Growing the rotary table does not change the angles of the positions that were there."""
    model = from_transformers(tiny_llama(dtype=torch.float64, seed=8), layout="plain")
    before = rows_of(fresh_rows(model, [1, 2, 3]), 3)
    KVCache(model, CONTEXT)
    torch.testing.assert_close(rows_of(fresh_rows(model, [1, 2, 3]), 3), before, rtol=0, atol=1e-10)


def pieces(length: int, **options: int) -> list[tuple[int, int]]:
    """(first, end) of each pass that reads a text of so many tokens."""
    found = [(0, piece_end(0, length, **options))]
    while found[-1][1] < length:
        found.append((found[-1][1], piece_end(found[-1][1], length, **options)))
    return found


@pytest.mark.parametrize("length", [1, 1024, 1025, 5000, 40000])
def test_prefill_passes_keep_their_masks_small(length: int) -> None:
    found = pieces(length)
    assert all(first < end <= length for first, end in found)
    assert max(end - first for first, end in found) <= 1024
    masks = [(end - first) * end for first, end in found if first and end - first > 128]
    assert max(masks, default=0) <= 4 << 20
    assert len(found) == -(-length // 1024) or length > 4096


@given(length=st.integers(1, 9000), most=st.integers(1, 1100), together=st.integers(0, 300))
def test_the_last_rows_are_read_together(length: int, most: int, together: int) -> None:
    """As many as shall be; and no pass is longer than it may be but for that."""
    found = pieces(length, most=most, together=together)
    assert all(first < end <= length for first, end in found)
    assert found[-1][0] <= max(length - together, 0)
    assert all(end - first <= most for first, end in found[:-1])
    assert found[-1][1] - found[-1][0] <= max(most, together)


def test_prefill_in_passes_that_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip_models.prefill._MASK_ELEMENTS", 50 * 120)
    monkeypatch.setattr("layerskip_models.prefill._FEWEST_ROWS", 10)
    prompt = [i * i % 23 for i in range(301)]
    assert [end - first for first, end in pieces(301, most=50)][:3] == [50, 50, 40]
    llama = tiny_llama(num_layers=3, dtype=torch.float64, max_position_embeddings=400, seed=3)
    model = from_transformers(llama, layout="plain")
    with torch.inference_mode():
        policy = parse_policy("ls:1-3", num_layers=3)
        text = Sequence(model, KVCache(model, 321), request_for(model, prompt, max_new_tokens=20), policy)
        lengths = []
        while text.reading:
            lengths.append(text.length - text.cache.length)
            read_prompts([text], 50)
        assert lengths == [301 - first for first, _ in pieces(301, most=50)]
        for _ in decode(text, EagerRunner(model)):
            pass
    assert text.tokens[0, 301 : text.length].tolist() == reference_greedy(llama, prompt, max_new_tokens=20)
    whole, parts = KVCache(model, 321), KVCache(model, 321)
    ids = torch.tensor(prompt)
    hidden = [prefill(model, ids, cache, most=most)[-1] for cache, most in ((whole, 301), (parts, 50))]
    torch.testing.assert_close(*hidden, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="holds all of this text already"):
        prefill(model, ids, parts)
