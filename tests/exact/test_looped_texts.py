"""Texts that are decoded along the diagonal are plain decoding's own, alone and in company; and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import GenerationConfig

import selfspec.engine.wave
from batched_runs import (
    LAYOUTS,
    Wish,
    assert_same,
    looped_generator,
    looped_model,
    needs_native,
    run_alone,
    run_together,
)
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from selfspec.engine.draft import Draft
from tiny_llama import tiny_tokenizer

WAVE = "wave:loop=1"
PENALTY = {"generation_config": GenerationConfig(repetition_penalty=1.3)}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": PENALTY,
    "one choice": {"do_sample": True, "seed": 5, "top_k": 1},
    "seeded": {"do_sample": True, "seed": 11, "temperature": 1.2, "top_k": 9},
    "seeded penalty": {"do_sample": True, "seed": 5, **PENALTY},
}


def wish(policy: str = WAVE, prompt: tuple[int, ...] = (3, 1, 4, 1), *, most: int = 24, **options: Any) -> Wish:
    return Wish(prompt=[*prompt], policy=policy, options={"max_new_tokens": most, **options})


def check_alone(layout: Layout, normed: bool, mode: str, policy: str = WAVE) -> None:
    """Greedy text is plain decoding's, with the same keys and values; seeded text is the same each time."""
    model, drafted, accepted = looped_model(layout, normed=normed), 0, 0
    other = "ar" if "seeded" not in mode else policy
    for prompt in ((3, 1, 4, 1), (9, 9, 3), (5,), (2, 14, 3)):
        course = run_alone(model, wish(policy, prompt, **MODES[mode]))
        assert_same(course, run_alone(model, wish(other, prompt, **MODES[mode])), rounds=False, exact=layout != "plain")
        assert course.result is not None
        drafted += course.result.stats.num_drafted
        accepted += course.result.stats.num_accepted
    assert 0 < accepted < drafted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_alone(layout: Layout, normed: bool, mode: str) -> None:
    check_alone(layout, normed, mode)
    check_alone(layout, normed, mode, "wave:loop=2")


@needs_native
@pytest.mark.parametrize("mode", MODES)
def test_in_company(mode: str) -> None:
    """The text, in the company of texts of every kind that come and go, is bit for bit what it is alone."""
    generator, own = looped_generator("native", prefix_cache=0), wish(**MODES[mode])
    others = ("ar", "ls:2-3", "ls:5-2", "copy:4", WAVE, "wave:loop=2", "auto")
    greedy = [replace(wish(name, (5, at, 7, 5), most=10 + at), joins=at) for at, name in enumerate(others)]
    seeded = [replace(one, options={**one.options, **MODES["seeded"]}) for one in greedy[:-1]]
    wishes = [own, *greedy, *seeded, replace(own, leaves=9)]
    for course, one in zip(run_together(generator, wishes), wishes[:-1]):
        assert_same(course, run_alone(generator.model, one), rounds=one.policy in others[:4])


@pytest.mark.parametrize("policy", [WAVE, "wave:loop=3", "auto"])
def test_every_budget_and_every_stop(policy: str) -> None:
    """Budgets below the number of loops, too; stops and stop strings anywhere in a text whose drafts run ahead of them."""
    model = looped_model("plain")
    said = run_alone(model, wish("ar")).tokens
    for most in range(1, 8):
        course = run_alone(model, wish(policy, most=most))
        assert course.tokens == said[:most]
        assert course.result is not None and course.result.stats.loaded_layers <= (most - 1) * model.num_layers
    for at in range(len(said) - 1):
        string = tiny_tokenizer().decode(said[at : at + 2])
        for stop in ({"eos_token_id": [said[at]]}, {"stop_strings": [string]}):
            options: dict[str, Any] = {"generation_config": GenerationConfig(**stop)}
            plain, found = (run_alone(model, wish(name, **options)) for name in ("ar", policy))
            assert_same(found, plain, rounds=False, exact=False)


def one_loop_is_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    original = KVCache.roll_back

    def fault(self: KVCache, length: int) -> None:
        held = self.loop(1).length
        original(self, length)
        self.loop(1).declare(held)

    patch.setattr(KVCache, "roll_back", fault)


def a_row_reads_another_loop(patch: pytest.MonkeyPatch) -> None:
    """Rows of the second loop find, and write, the keys and values of the third."""
    original = KVCache.loop

    def fault(self: KVCache, index: int) -> KVCache:
        part, other = original(self, index), original(self, 2)
        if index == 1:
            part.keys, part.values, part._parts, part.described = other.keys, other.values, other._parts, None
        return part

    patch.setattr(KVCache, "loop", fault)


def rows_behind_a_rejection_stay(patch: pytest.MonkeyPatch) -> None:
    original = selfspec.engine.wave._land

    def fault(draft: Draft, said: Any) -> None:
        behind = draft.flight[1:]
        original(draft, said)
        if draft.flight and behind and not draft.flight[0].loops:
            draft.flight = [replace(behind[0], token=draft.flight[0].token), *behind[1:]]

    patch.setattr(selfspec.engine.wave, "_land", fault)


FAULTS = (one_loop_is_not_rolled_back, a_row_reads_another_loop, rows_behind_a_rejection_stay)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_finds(fault: Callable[[pytest.MonkeyPatch], None], layout: Layout) -> None:
    """And passes without it: `test_alone`."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, ValueError, IndexError)):
        fault(patch)
        check_alone(layout, True, "greedy")
