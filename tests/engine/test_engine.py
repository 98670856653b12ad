"""An engine for texts that come and go: its surface, when prompts are read, what it lets go of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import selfspec.engine.engine
import selfspec.engine.round
from batched_runs import (
    LAYOUTS,
    NUM_LAYERS,
    CacheCount,
    Wish,
    assert_same,
    generator_of,
    run_alone,
    run_together,
    shared_model,
)
from layerskip_models import LayerSkipModel
from layerskip_models.linear import Layout
from layerskip_models.prefill import PromptPiece
from policies import parse_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.engine.policy_store import lend
from selfspec.engine.results import StepOutput
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [5, 1, 7]


def test_a_cancelled_text_is_gone_and_may_be_cancelled_again() -> None:
    generator = generator_of("plain")
    expected = generator.generate(PROMPT, max_new_tokens=12, policy="ls:2-3").new_tokens
    with generator.engine() as engine:
        first = engine.add([9, 9], max_new_tokens=12, policy="ls:2-3")
        other = engine.add(PROMPT, max_new_tokens=12, policy="ls:2-3")
        got: list[int] = []
        for step in range(30):
            if step == 2:
                for ticket in (first, first, 99):
                    engine.cancel(ticket)
                assert len(engine) == 1
            found = engine.step()
            assert step < 2 or all(progress.ticket == other for progress in found)
            got += [token for progress in found if progress.ticket == other for token in progress.tokens]
        assert got == expected
        engine.cancel(other)  # which is complete
        third = engine.add(PROMPT, max_new_tokens=12, policy="ls:2-3")
        engine.cancel(third)  # before it ran at all
        assert engine.step() == [] and len(engine) == 0


def test_a_closed_engine_has_let_go_of_everything() -> None:
    policy = parse_policy("fs:2-3", num_layers=4)
    with pytest.raises(ZeroDivisionError), generator_of("plain").engine() as engine:
        for _ in range(3):
            engine.add(PROMPT, max_new_tokens=9, policy=policy)
        engine.step()
        assert len(engine) == 3
        raise ZeroDivisionError
    assert len(engine) == 0 and engine.step() == []
    engine.close()  # once more
    with lend(policy) as loan:
        assert loan.policy is policy


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_text_held_is_free_when_it_is_gone(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete or cancelled, while the engine goes on: one idle cache is kept for the next text, which takes it over."""
    caches = CacheCount(monkeypatch)
    generator = generator_of(layout)
    with generator.engine() as engine:
        for policy in ("ar", "ls:2-3"):
            for length in (30, 20, 10):
                engine.add(PROMPT, max_new_tokens=length, policy=policy)
            tickets = [engine.add(PROMPT, max_new_tokens=25, policy=policy) for _ in range(3)]
            for _ in range(4):
                engine.step()
            for ticket in tickets:
                engine.cancel(ticket)
            assert caches.alive <= len(engine) + 1
            while len(engine):
                engine.step()
            assert caches.alive == 1
        made = len(caches.made)
        engine.add(PROMPT, max_new_tokens=30)
        assert len(caches.made) == made


def test_new_weights_between_two_texts_of_an_engine() -> None:
    """A text ends with the weights it began with, those that join are on the new ones; unused copies are let go."""
    llama = tiny_llama(dtype=torch.float64, seed=3)
    generator = SelfSpecGenerator(llama, policy="ls:2-4")
    models: list[weakref.ref[LayerSkipModel]] = []
    expected: dict[int, list[int]] = {}
    with generator.engine() as engine:
        for number in range(12):
            llama.load_state_dict(tiny_llama(dtype=torch.float64, seed=3 + number).state_dict())
            ticket = engine.add(PROMPT, max_new_tokens=14)
            expected[ticket] = reference_greedy(llama, PROMPT, max_new_tokens=14)
            models.append(weakref.ref(generator.model))
            for _ in range(1 + 20 * (number % 3)):  # at times with others beside it, at times to its end
                for progress in engine.step():
                    assert progress.result is None or progress.result.new_tokens == expected.pop(progress.ticket)
            gc.collect()
            assert sum(model() is not None for model in models) <= len(engine) + 2
    assert not expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_prompt_is_read_in_pieces_while_others_go_on(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever decodes gets a token in every step; of the prompts no more rows are read in a step than may be."""
    monkeypatch.setattr(selfspec.engine.engine, "PIECE_ROWS", 4)
    read = [0]
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
        assert decoding <= {progress.ticket for progress in found if progress.tokens}
        read.append(0)

    courses = run_together(generator_of(layout), texts, watch)
    for text, course in zip(texts, courses):
        expected = run_alone(shared_model(layout), text)
        assert_same(course, expected, exact=layout == "native")
        assert course.steps == [*range(course.steps[0], course.steps[-1] + 1)]  # once it decodes, in every step
        numbers = NUM_LAYERS * 2 * 2 * 8 * (len(text.prompt) + text.options["max_new_tokens"])
        assert course.result is not None  # a cache has room for its own text, whatever the others need
        assert course.result.stats.peak_cache_bytes == numbers * shared_model(layout).dtype.itemsize
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


def test_a_call_within_a_step_of_an_engine() -> None:
    """A processor that asks the same generator: it has a cache, passes and a copy of the policy of its own."""
    generator = generator_of("plain")
    expected = generator.generate(PROMPT, max_new_tokens=12, policy="ls:2-3").new_tokens
    inner: list[list[int]] = []

    class Asking(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if len(inner) < 4:
                inner.append(generator.generate(PROMPT, max_new_tokens=12, policy="ls:2-3").new_tokens)
            return scores

    options = {"max_new_tokens": 12, "policy": "ls:2-3"}
    processors = [LogitsProcessorList([Asking()]), None]
    found = generator.generate_batch([PROMPT, PROMPT], logits_processor=processors, **options)
    assert [*(one.new_tokens for one in found), *inner] == [expected] * 6
