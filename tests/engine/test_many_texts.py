"""A text in a batch is the text alone: the same tokens by the same rounds, on our own kernels bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

import selfspec.engine.engine
import selfspec.engine.round
from batched_runs import (
    LAYOUTS,
    NUM_LAYERS,
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
from selfspec.engine.engine import Engine
from selfspec.engine.results import StepOutput


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
