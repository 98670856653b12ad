"""A text in a batch is the text alone: the same tokens by the same rounds, on our own kernels bit for bit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

import selfspec.engine.engine
import selfspec.engine.round
from batched_runs import (
    BATCH_SENSITIVE,
    LAYOUTS,
    NUM_LAYERS,
    POLICIES,
    Wish,
    assert_same,
    each_policy,
    generator_of,
    random_kv_dtype,
    random_wish,
    run_alone,
    run_together,
    shared_model,
)
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kernels.native_forward import NativeForward
from layerskip_models.kv_cache import CacheRows
from layerskip_models.linear import Layout
from layerskip_models.prefill import PromptPiece
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.engine.results import StepOutput
from tiny_llama import reference_greedy, tiny_tokenizer

EXAMPLES = 26


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_in_a_batch_is_the_text_alone(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any policies, exit layers, settings and stops beside each other; texts join and leave when they like.

    Prompts are read a few rows at a time while others decode. On our kernels a third of the batches have weights of 4 bits.
    On operators, numbers may differ in their last digits, which no text here shows.
    """
    monkeypatch.setattr(selfspec.engine.engine, "PIECE_ROWS", 7)
    count: Counter[str] = Counter()
    names = itertools.cycle(POLICIES)
    count_steps(count, monkeypatch)

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
    def check(seed: int) -> None:
        random = Random(seed)
        texts = [random_wish(random, next(names)) for _ in range(random.randint(2, 7))]
        if random.random() < 0.3:  # whole passes are single calls where all are greedy, and have no processors
            kept = ("max_new_tokens", "eos_token_id", "stop_strings")
            texts = [replace(t, options={k: v for k, v in t.options.items() if k in kept}) for t in texts]
        own: Layout = "int4" if seed % 3 == 0 and layout == "native" else layout
        kv_dtype = random_kv_dtype(random, layout)
        count[kv_dtype] += 1
        courses = run_together(generator_of(own, kv_dtype), texts)
        for text, course in zip(texts, courses):
            expected = run_alone(shared_model(own, kv_dtype), text)
            if course.result is None:
                assert text.leaves is not None
                assert course.tokens == expected.tokens[: len(course.tokens)]
                count["cancelled"] += 1
                continue
            rounds = text.policy not in BATCH_SENSITIVE
            assert_same(course, expected, rounds=rounds, exact=layout == "native" and rounds)
            assert course.result.trace is not None
            count.update(["texts", text.policy, course.result.stop_reason, own])
            count["sampled"] += bool(text.options.get("do_sample"))
            count["in a batch"] += any(record.batch_size > 1 for record in course.result.trace)
            count["with drafts accepted and rejected"] += (
                0 < course.result.stats.num_accepted < course.result.stats.num_drafted
            )

    check()
    print(dict(count))
    # Were these rare, the equality above would say little.
    assert min(count[name] for name in POLICIES) >= 2
    assert count["cancelled"] >= EXAMPLES // 6
    assert count["in a batch"] >= count["texts"] // 2
    assert count["with drafts accepted and rejected"] >= count["texts"] // 3
    assert min(count["sampled"], count["eos"], count["stop_string"]) >= EXAMPLES // 4
    if layout == "native":
        assert min(count["tokens"], count["rows"], count["int4"]) >= EXAMPLES // 2
        assert min(count["auto"], count["bfloat16"]) >= EXAMPLES // 6


def count_steps(count: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """How often several texts went through layers in a single call."""
    tokens, rows = NativeForward.tokens, NativeForward.rows

    def counted_tokens(self: NativeForward, given: list[int], *rest: Any, **options: Any) -> Any:
        count["tokens"] += len(given) > 1
        return tokens(self, given, *rest, **options)

    def counted_rows(self: NativeForward, x: Tensor, where: CacheRows, *rest: Any, **options: Any) -> Any:
        count["rows"] += len(where) > 1
        return rows(self, x, where, *rest, **options)

    monkeypatch.setattr(NativeForward, "tokens", counted_tokens)
    monkeypatch.setattr(NativeForward, "rows", counted_rows)


@pytest.mark.parametrize(("layout", "name"), each_policy([name for name in POLICIES if name not in BATCH_SENSITIVE]))
def test_one_policy_for_all_is_a_policy_for_each(name: str, layout: Layout) -> None:
    """One `Policy` that several texts are given: each decides by what it has seen itself, greedy or sampled."""
    model = shared_model(layout)
    one = Wish(prompt=[], policy=name).arguments(model)["policy"]
    prompts = [[5, 1, 7], [3] * 9, [20, 4], [11, 2, 2, 8]]
    options: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": 3},
        {"eos_token_id": [9]},
        {"repetition_penalty": 1.2},
    ]
    texts = [Wish(prompt=p, policy=name, options={"max_new_tokens": 15, **o}) for p, o in zip(prompts, options)]
    given = [replace(text, options={**text.options, "policy": one}) for text in texts]
    for text, course in zip(texts, run_together(generator_of(layout), given)):
        assert_same(course, run_alone(model, text), exact=layout == "native")


def test_greedy_texts_in_a_batch_are_transformers_own(llama64: LlamaForCausalLM) -> None:
    generator = SelfSpecGenerator(from_transformers(llama64, layout="plain"), tiny_tokenizer())
    prompts = [[5, 1, 7], [2], [9, 9, 3, 0, 23, 4, 4, 1], list(range(20))]
    options: list[dict[str, Any]] = [{}, {"eos_token_id": [4]}, {"repetition_penalty": 1.3}, {"stop_strings": ["a"]}]
    for name in ("ar", "ls:2-4", "dv:1", "auto:cost=layers"):
        texts = [Wish(prompt=p, policy=name, options={"max_new_tokens": 25, **o}) for p, o in zip(prompts, options)]
        for text, course in zip(texts, run_together(generator, texts)):
            assert course.tokens == reference_greedy(llama64, text.prompt, **text.options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_prompt_is_read_in_pieces_while_others_go_on(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever decodes gets a token in every step; of the prompts no more rows are read in a step than may be."""
    monkeypatch.setattr(selfspec.engine.engine, "PIECE_ROWS", 4)
    read: list[int] = []
    original = selfspec.engine.round.read_pieces

    def counted(model: LayerSkipModel, pieces: Sequence[PromptPiece], stop: int) -> list[Tensor]:
        read[-1] += sum(piece.rows for piece in pieces)
        return original(model, pieces, stop)

    monkeypatch.setattr(selfspec.engine.round, "read_pieces", counted)
    texts = [
        Wish(prompt=[5, 1, 7], policy="ls:{E}-4", options={"max_new_tokens": 40}),
        Wish(prompt=[3, 9] * 11, policy="dv:{E}", options={"max_new_tokens": 20}, joins=2),
        Wish(prompt=[8, 2, 4], policy="ar", options={"max_new_tokens": 20}, joins=3),
        Wish(prompt=[6] * 14, policy="ls:{E}-4", options={"max_new_tokens": 20}, joins=4),
    ]

    def watch(engine: Engine, found: list[StepOutput]) -> None:
        decoding = {ticket for ticket, slot in engine._slots.items() if not slot.sequence.reading}
        got = {progress.ticket: progress.tokens for progress in found}
        assert all(got.get(ticket) for ticket in decoding)
        read.append(0)

    read.append(0)
    courses = run_together(generator_of(layout), texts, watch)
    for text, course in zip(texts, courses):
        expected = run_alone(shared_model(layout), text)
        assert_same(course, expected, exact=layout == "native")
        assert course.steps == [*range(course.steps[0], course.steps[-1] + 1)]  # once it decodes, in every step
    # 22, 3 and 14 rows, four in every step, the third prompt with what is left of the second's last piece.
    assert [course.steps[0] for course in courses] == [0, 2 + 5, 2 + 6, 2 + 9]
    assert read[:12] == [3, 0, *[4] * 9, 3]


def test_with_nobody_decoding_prompts_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the pass is full: nobody waits for a token meanwhile. The others in pieces, in the order in which they came."""
    monkeypatch.setattr(selfspec.engine.engine, "PIECE_ROWS", 15)
    monkeypatch.setattr(selfspec.engine.engine, "FULL_ROWS", 60)
    texts = [Wish(prompt=[token] * 30, options={"max_new_tokens": 6}) for token in (1, 2, 3)]
    courses = run_together(generator_of("plain"), texts)
    assert [course.steps for course in courses] == [[*range(6)], [*range(6)], [*range(2, 8)]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("full", [1, 12, 40])
def test_short_prompts_share_a_pass(layout: Layout, full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reading of the weights for several prompts, each of which is read as if alone, what policies see of it included."""
    monkeypatch.setattr(selfspec.engine.engine, "FULL_ROWS", full)
    passes = []
    original = selfspec.engine.round.read_pieces

    def counted(model: LayerSkipModel, pieces: Sequence[PromptPiece], stop: int) -> list[Tensor]:
        passes.append(len(pieces))
        return original(model, pieces, stop)

    monkeypatch.setattr(selfspec.engine.round, "read_pieces", counted)
    lengths, names = (5, 9, 1, 14, 3, 7), ("ls:{E}-3", "del", "ar", "pacer:{E}", "auto:cost=layers", "dv:{E}")
    texts = [
        Wish(prompt=[(7 * i + length) % 23 for i in range(length)], policy=name, options={"max_new_tokens": 9})
        for length, name in zip(lengths, names)
    ]
    courses = run_together(generator_of(layout), texts)
    assert passes[0] == {1: 1, 12: 2, 40: 6}[full]  # at 1 and 12 the others follow beside decoding
    for text, course in zip(texts, courses):
        assert_same(course, run_alone(shared_model(layout), text), exact=layout == "native")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_takes_as_much_memory_as_alone(layout: Layout) -> None:
    """Its cache has room for its own tokens, whatever the others need."""
    texts = [
        Wish(prompt=[3] * size, policy="ls:{E}-4", options={"max_new_tokens": new})
        for size, new in ((3, 5), (30, 20), (1, 30), (12, 9))
    ]
    for text, course in zip(texts, run_together(generator_of(layout), texts)):
        expected = run_alone(shared_model(layout), text)
        assert course.result is not None and expected.result is not None
        assert course.result.stats.peak_cache_bytes == expected.result.stats.peak_cache_bytes
        numbers = NUM_LAYERS * 2 * 2 * 8 * (len(text.prompt) + text.options["max_new_tokens"])
        assert course.result.stats.peak_cache_bytes == numbers * shared_model(layout).dtype.itemsize


@pytest.mark.usefixtures("small_captures")
@pytest.mark.parametrize("leaves", [None, 5])
def test_a_captured_text_that_joins_a_batch_goes_on_eagerly(leaves: int | None, llama64: LlamaForCausalLM) -> None:
    """And so does one that was in a batch and is then alone; the next one that is alone is captured again."""
    model = from_transformers(llama64, layout="plain")
    generator = SelfSpecGenerator(model, tiny_tokenizer(), runner="captured")
    options = {"max_new_tokens": 24}
    sampled = {**options, "do_sample": True, "seed": 5}
    for policy in ("ar", "ls:{E}-3", "changing plans", "auto:cost=layers", "stop after a draw"):
        texts = [
            Wish(prompt=[5, 1, 7, 5, 1, 7, 5], policy=policy, options=options, leaves=leaves),
            Wish(prompt=[2, 2, 9, 2, 2, 9], policy=policy, options=sampled, joins=3),
            Wish(prompt=[8], policy=policy, options=options, joins=60),
        ]
        courses = run_together(generator, texts)
        for text, course in zip(texts, courses):
            expected = run_alone(model, replace(text, policy=policy.replace("layers", "layers,copy=off")))
            if text.leaves is None:
                assert_same(course, expected, exact=False)
            assert course.tokens == expected.tokens[: len(course.tokens)]
        kinds = [None if course.result is None else course.result.stats.runner for course in courses]
        assert kinds == ["eager" if leaves is None else None, "eager", "captured"]
    assert generator.runner == "captured"
