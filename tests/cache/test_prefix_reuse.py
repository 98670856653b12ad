"""A prompt that begins like a kept text goes on from there; the answer is what a fresh cache gives, bit for bit."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList

import selfspec.engine.engine
from batched_runs import (
    BATCH_SENSITIVE,
    LAYOUTS,
    POLICIES,
    Course,
    Wish,
    assert_same,
    needs_native,
    random_kv_dtype,
    run_alone,
    run_together,
)
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.linear import Layout
from selfspec import SelfSpecGenerator
from selfspec.cache.pool import SMALL_LOSS, CacheSlot, KeptTexts, KVCachePool
from selfspec.cache.prefix_cache import parse_bytes
from tiny_llama import VOCAB_SIZE, tiny_llama, tiny_tokenizer

HAS_STATES = "pacer:random,exit_layer={E},b=2,t=0.3"
"""A policy that hands hidden states on with the text. It has more turns than the others."""
EXAMPLES = {"native": 8, "plain": 6}
POSITIONS = 320
ROW_BYTES = 4 * 2 * 2 * 8 * 4
"""Keys and values of one position: layers, two of them, heads, head_dim, float32."""


@cache
def model_of(layout: Layout) -> LayerSkipModel:
    dtype = torch.float32 if layout == "native" else torch.float64
    llama = tiny_llama(heads=4, kv_heads=2, late_scale=0.5, dtype=dtype, seed=21, max_position_embeddings=POSITIONS)
    return from_transformers(llama, layout=layout)


def generator_of(layout: Layout, prefix_cache: int | str | None, **options: Any) -> SelfSpecGenerator:
    return SelfSpecGenerator(model_of(layout), tiny_tokenizer(), prefix_cache=prefix_cache, **options)


def tokens_of(random: Random, least: int, most: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(random.randint(least, most))]


def next_prompt(random: Random, texts: list[list[int]]) -> list[int]:
    """A new conversation, or an earlier text, whole or up to some token, with something behind it."""
    if not texts or random.random() < 0.1:
        return tokens_of(random, 1, 60)
    text = random.choice(texts[-6:])
    if random.random() < 0.4:
        text = text[: random.randint(1, len(text))]
    return (text + tokens_of(random, 0, 20))[: POSITIONS - 30]


def reused(course: Course) -> int:
    assert course.result is not None
    return course.result.stats.num_reused_tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trees_of_conversations_are_what_fresh_caches_give(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any policy, greedy or sampled, alone or in a batch, whatever is kept: tokens, rounds, keys and values."""
    monkeypatch.setattr(selfspec.engine.engine, "PIECE_ROWS", 9)
    count: Counter[str] = Counter()
    names = itertools.cycle(POLICIES)

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=EXAMPLES[layout], phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
    def check(seed: int) -> None:
        random = Random(seed)
        kept = random.choice([150, 600, 5000]) * ROW_BYTES
        kv_dtype = random_kv_dtype(random, layout)
        size = None if layout == "native" and random.random() < 0.25 else kept
        generator = generator_of(layout, size, kv_dtype=kv_dtype)
        texts: list[list[int]] = []
        for _ in range(5):
            wishes = []
            for _ in range(random.choice([1, 1, 2, 4])):
                policy = next(names) if random.random() < 0.6 else HAS_STATES
                options: dict[str, Any] = {"max_new_tokens": random.randint(1, 25)}
                if policy not in BATCH_SENSITIVE and random.random() < 0.4:
                    options |= {"do_sample": True, "seed": random.randrange(1000), "temperature": 1.2}
                if random.random() < 0.2:
                    options |= {"repetition_penalty": 1.3}
                prompt, exit_layer = next_prompt(random, texts), random.randint(1, 3)
                joins = random.choice([0, random.randint(0, 5)])
                leaves = random.randint(0, 9) if random.random() < 0.15 else None
                wishes.append(Wish(prompt=prompt, policy=policy, exit_layer=exit_layer, options=options,
                                   joins=joins, leaves=leaves))  # fmt: skip
            for wish, course in zip(wishes, run_together(generator, wishes)):
                texts.append([*wish.prompt, *course.tokens])
                expected = run_alone(generator.model, wish)
                if course.result is None:
                    assert course.tokens == expected.tokens[: len(course.tokens)]
                    count["cancelled"] += 1
                    continue
                rounds = wish.policy not in BATCH_SENSITIVE
                assert_same(course, expected, rounds=rounds, exact=layout == "native" and rounds)
                assert reused(course) < len(wish.prompt)
                count["texts"] += 1
                count["reused"] += reused(course) > 0
                count[wish.policy] += reused(course) > 0
                count["with states"] += reused(course) > 0 and course.context is not None
                count["most"] += reused(course) > len(wish.prompt) // 2
            assert generator.kept_texts.num_bytes <= kept or generator.kept_texts.count <= 1

    check()
    print(dict(count))
    # Were these rare, the equality above would say little.
    assert count["reused"] >= count["texts"] // 3
    assert count["most"] >= count["texts"] // 6
    assert count["cancelled"] >= EXAMPLES[layout] // 5
    assert count["with states"] >= EXAMPLES[layout] // 6
    assert sum(count[name] > 0 for name in POLICIES) >= len(POLICIES) * 2 // 5


class Pool:
    """What a generator keeps, from the outside: calls, and how many tokens of their prompts were not read."""

    def __init__(self, prefix_cache: int | str | None, layout: Layout = "plain", **options: Any) -> None:
        self.generator = generator_of(layout, prefix_cache, **options)

    def reused(self, prompt: list[int], new: int = 10, **options: Any) -> int:
        options = {"max_new_tokens": new, "policy": "ar", **options}
        result = self.generator.generate(prompt, **options)
        fresh = SelfSpecGenerator(self.generator.model, prefix_cache=0).generate(prompt, **options)
        assert result.new_tokens == fresh.new_tokens
        assert fresh.stats.num_reused_tokens == 0
        self.text = [*prompt, *result.new_tokens]
        return result.stats.num_reused_tokens

    @property
    def idle(self) -> list[CacheSlot]:
        return [*self.generator._models.current.pool._idle]


A, B, C = ([token] * 50 for token in (3, 7, 11))


@pytest.fixture
def pool() -> Pool:
    return Pool("1MB")


def test_what_is_read_again(pool: Pool) -> None:
    """The last row, whose logits are needed; and the rows that a policy learns from."""
    assert [pool.reused(prompt) for prompt in (A, A, A[:20])] == [0, 49, 19]
    seq_round = [*pool.text, 5, 5, 5, 5]
    assert pool.reused([*A, *pool.text]) >= 49
    assert pool.reused(seq_round, policy="del") == min(len(seq_round) - 33, 29)
    assert [pool.reused(prompt, policy="del") for prompt in (A, A[:33])] == [50 - 33, 0]


def test_several_texts_are_kept_and_the_oldest_goes_first() -> None:
    """Unused room is given up before a text is."""
    pool = Pool(2 * 60 * 2 * ROW_BYTES)  # float64; room for two texts of 60 positions
    assert [pool.reused(prompt) for prompt in (A, B, A, B)] == [0, 0, 49, 49]
    assert [pool.reused(prompt) for prompt in (C, B, C)] == [0, 49, 49]  # in place of A
    assert pool.reused(A) == 0
    assert pool.generator.kept_texts == KeptTexts(2, 2 * 60 * 2 * ROW_BYTES)
    pool = Pool(2 * 70 * 2 * ROW_BYTES)
    pool.reused(A, 200, eos_token_id=[3, *pool.generator.generate(A, max_new_tokens=1).new_tokens])
    pool.reused(B)
    assert pool.generator.kept_texts.count == 2
    assert [pool.reused(prompt) for prompt in (A, B)] == [49, 49]


@pytest.mark.parametrize("times", [1, 2])
def test_a_branch_leaves_the_other_one_as_it_is(pool: Pool, times: int) -> None:
    """Where more than a few rows would be lost, the common ones are copied. A second branch writes over a short one."""
    pool.reused(A, new=SMALL_LOSS + 10)
    long = pool.text
    for token in range(times):
        assert pool.reused([*A, token]) == 50
    assert pool.reused([*long, 1]) == len(long) - 1
    assert pool.generator.kept_texts.count == 2


def test_a_text_that_goes_on_leaves_nothing_behind(pool: Pool) -> None:
    """And the last token of an answer has no row yet."""
    pool.reused(A)
    for _ in range(3):
        before = len(pool.text)
        assert pool.reused([*pool.text, 4, 9]) == before - 1
    assert pool.generator.kept_texts.count == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_goes_on_from_one_that_is_still_being_decoded(layout: Layout) -> None:
    """From what that one has read of its prompt, even if it is not at its end."""
    generator = generator_of(layout, "1MB")
    wishes = [
        Wish(prompt=B, options={"max_new_tokens": 40}),
        Wish(prompt=A, policy="ls:{E}-4", options={"max_new_tokens": 30}, joins=1),
        Wish(prompt=[*A, 5], policy="ls:{E}-4", options={"max_new_tokens": 20}, joins=2),
        Wish(prompt=[*A, 6], policy="del", options={"max_new_tokens": 20}, joins=8),
        Wish(prompt=A, policy="ar", options={"max_new_tokens": 20, "do_sample": True, "seed": 1}, joins=8),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfspec.engine.engine, "PIECE_ROWS", 20)
        courses = run_together(generator, wishes)
    assert [reused(course) for course in courses] == [0, 0, 20, 51 - 33, 49]
    for wish, course in zip(wishes, courses):
        assert_same(course, run_alone(generator.model, wish), exact=layout == "native")


@pytest.mark.parametrize("size", [None, 0])
def test_nothing_is_reused_where_the_size_is_0_or_on_operators_without_a_size(size: int | None) -> None:
    """There a kept row may differ in its last digits. The memory is used again, as ever."""
    pool = Pool(size)
    assert [pool.reused(A), pool.reused(A)] == [0, 0]
    assert pool.generator.kept_texts.count == 0 and len(pool.idle) == 1


@needs_native
def test_on_our_own_kernels_the_last_text_is_used() -> None:
    pool = Pool(None, "native")
    assert [pool.reused(A), pool.reused(A), pool.reused(B), pool.reused(A)] == [0, 49, 0, 0]
    (slot,) = pool.idle
    assert pool.reused(pool.text[:55], 4) == 55 - 1
    assert pool.idle == [slot]
    assert pool.reused([*pool.text, 1], 100) > 50  # in a longer cache, with the rows copied
    assert len(pool.idle) == 1 and pool.idle != [slot]
    assert pool.generator.kept_texts == KeptTexts(1, pool.idle[0].cache.num_bytes)


def test_pacers_states_are_kept_with_the_text(pool: Pool) -> None:
    """A text that lacks them is read from its beginning."""
    wish = Wish(prompt=A, policy="pacer:random,exit_layer={E},b=2,t=0.3")
    options = {"max_new_tokens": 10, **wish.arguments(pool.generator.model)}
    other = replace(wish, exit_layer=1).arguments(pool.generator.model)
    found = [pool.generator.generate(A, **options).stats.num_reused_tokens for _ in range(2)]
    assert found == [0, 49]
    assert pool.generator.generate(A, **{**options, **other}).stats.num_reused_tokens == 49
    assert pool.generator.generate([*A, 1], max_new_tokens=1, policy="ar").stats.num_reused_tokens == 50
    pool.generator.generate(B, max_new_tokens=4, policy="ar")
    assert pool.generator.generate([*B, 1], **options).stats.num_reused_tokens == 0


def test_a_cancelled_text_leaves_what_was_read_and_a_failed_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfspec.engine.engine, "PIECE_ROWS", 20)

    def nan(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * (torch.nan if input_ids.shape[1] == 55 else 1)

    pool, failing = Pool("1MB"), Pool("1MB")
    with pool.generator.engine() as engine:
        engine.add(B, max_new_tokens=100, policy="ar")
        engine.step()
        ticket = engine.add(A, max_new_tokens=10)
        engine.step()
        engine.cancel(ticket)
        engine.cancel(1)
    assert [pool.reused(A), pool.reused(B)] == [20, 49]
    with pytest.raises(RuntimeError):
        failing.generator.generate(A, policy="ar", max_new_tokens=10, logits_processor=LogitsProcessorList([nan]))
    assert failing.reused(A) == 0


def test_refresh_forgets_the_texts_of_a_model_that_is_not_copied(pool: Pool) -> None:
    """Those that are complete, and those that end later."""
    pool.reused(A)
    stream = pool.generator.stream(B, max_new_tokens=10, policy="ar")
    next(stream)
    pool.generator.refresh()
    assert pool.generator.kept_texts.count == 0
    stream.close()
    assert [pool.reused(A), pool.reused(B)] == [0, 0]
    assert [pool.reused(A), pool.reused(B)] == [49, 49]


def test_sizes() -> None:
    sizes = {0: 0, 12: 12, "0": 0, "200": 200, "2kB": 2000, "1.5 GB": 1_500_000_000, "1GiB": 1 << 30}
    assert {size: parse_bytes(size) for size in sizes} == sizes
    wrong: list[Any] = ["", "much", "-1", "1TBB", "1.5.1MB", -1, 1.5, True]
    for size in wrong:
        with pytest.raises(ValueError, match="prefix_cache must be"):
            SelfSpecGenerator(model_of("plain"), prefix_cache=size)


def test_a_place_that_returns_while_the_pool_changes_waits(pool: Pool) -> None:
    """The garbage collector may end a stream at any moment."""
    runners: KVCachePool = pool.generator._models.current.pool
    lent = runners.lend(10)
    slot = lent.__enter__()
    with runners._changing():
        lent.__exit__(None, None, None)
        assert slot not in runners._idle
    assert slot in runners._idle
