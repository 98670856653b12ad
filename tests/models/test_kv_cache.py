"""The KV cache against a list of rows, as a state machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from layerskip_models import LayerSkipModel, from_transformers, kv_cache
from layerskip_models.kv_cache import KVCache
from tiny_llama import CONTEXT, VOCAB_SIZE, tiny_llama

NUM_LAYERS = 3
LAYERS = from_transformers(tiny_llama(num_layers=NUM_LAYERS, dtype=torch.float64, seed=8), layout="plain")


def fresh_rows(model: LayerSkipModel, tokens: list[int]) -> KVCache:
    """A cache filled by one pass over a whole text."""
    cache = KVCache(model, max(len(tokens), 1))
    if tokens:
        model.run_layers(model.embed(torch.tensor(tokens)), 0, model.num_layers, cache)
    return cache


def rows_of(cache: KVCache, length: int) -> Tensor:
    """Keys and values of the first positions: [2, layers, kv_heads, length, head_dim]."""
    return torch.stack([cache.keys.mT[:, :, :length], cache.values[:, :, :length]])


def assert_same_rows(cache: KVCache, expected: KVCache, length: int) -> None:
    torch.testing.assert_close(rows_of(cache, length), rows_of(expected, length), rtol=0, atol=1e-10)


class CacheMachine(RuleBasedStateMachine):
    """Rows are appended to all layers, or to a lower range first; rolled back; overwritten. The model is a list of tokens
    for every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(LAYERS, CONTEXT)
        self.tokens: list[list[int]] = [[] for _ in range(NUM_LAYERS)]

    @property
    def common(self) -> list[int]:
        """The tokens that every layer holds."""
        return min(self.tokens, key=len)

    @property
    def is_even(self) -> bool:
        """Whether all layers hold the same tokens."""
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
    short = fresh_rows(model, [1, 2, 3])
    KVCache(model, CONTEXT)
    assert_same_rows(fresh_rows(model, [1, 2, 3]), short, 3)
