"""Decoding along the diagonal: texts are plain decoding's own, alone, in company, and where something breaks off in flight.

`tests/exact` has waves in every family that loops, beside processors and stops of all kinds; here planted faults are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

import selfspec.engine.wave
from batched_runs import (
    LAYOUTS,
    Wish,
    assert_same,
    generator_of,
    looped_generator,
    looped_model,
    needs_native,
    run_alone,
    run_together,
)
from callbacks import Spoiling
from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from policies import ObservationSpec, Plan, Policy
from scripted_policies import ScriptedExit
from selfspec.analysis.replay import trace_agreement, wave_sweeps
from selfspec.detokenize import token_sources
from selfspec.engine.draft import Draft
from selfspec.engine.wave import Row
from tiny_llama import tiny_tokenizer

PROMPT = [3, 1, 4, 1]
WAVE = "wave:loop=1"
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"do_sample": True, "seed": 11, "top_k": 9},
    "penalty": {"generation_config": GenerationConfig(repetition_penalty=1.3)},
}
every_mode = pytest.mark.parametrize("options", [*MODES.values()][:2], ids=["greedy", "seeded"])


def in_turn(*plans: Plan) -> Policy:
    exits = ScriptedExit([])
    exits._plans = [*plans]
    return Policy(exits)


def wave(loop: int) -> Plan:
    return Plan(exit_layer=None, max_speculations=0, wave=loop)


def wish(policy: str = WAVE, prompt: tuple[int, ...] = (3, 1, 4, 1), *, most: int = 24, **options: Any) -> Wish:
    return Wish(prompt=[*prompt], policy=policy, options={"max_new_tokens": most, **options})


def check_alone(layout: Layout, normed: bool, mode: str, policy: str = WAVE) -> None:
    """Greedy text is plain decoding's, with the same keys and values; seeded text is the same each time."""
    model, drafted, accepted = looped_model(layout, normed=normed), 0, 0
    other = "ar" if "seeded" not in mode else policy
    for prompt in ((3, 1, 4, 1), (9, 9, 3), (5,), (2, 14, 3)):
        course = run_alone(model, wish(policy, prompt, **MODES[mode]))
        assert_same(course, run_alone(model, wish(other, prompt, **MODES[mode])), rounds=False, exact=layout != "plain")
        assert course.result is not None and course.result.trace is not None
        for record in course.result.trace:
            assert [token for token, source in token_sources(record) if source != "rejected"] == [*record.tokens]
            drafted += record.num_drafted
            accepted += record.num_accepted
        assert course.result.stats.num_drafted == sum(record.num_drafted for record in course.result.trace)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_mistake_costs(layout: Layout) -> None:
    """Sweeps follow from the loops' own choices. The last token lands when its row has been through all loops."""
    generator = looped_generator(layout)
    trace = trace_agreement(generator, torch.tensor(PROMPT), 40)
    sweeps = wave_sweeps(trace, 4)
    assert {*sweeps} == {1, 2, 3, 4}
    stats = generator.generate(PROMPT, max_new_tokens=40, policy=WAVE, eos_token_id=[]).stats
    assert stats.loaded_layers == (sum(sweeps[:-1]) + 4) * generator.model.loop_layers


def one_loop_is_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    original = KVCache.roll_back
    patch.setattr(KVCache, "roll_back", lambda self, length: self.loop_index == 1 or original(self, length))


def rows_behind_a_new_token_stay(patch: pytest.MonkeyPatch, when: bool) -> None:
    """Keep them behind a row that has landed, or one of which an earlier loop thinks again."""
    original = selfspec.engine.wave._hear

    def fault(draft: Draft, row: Row, said: Any, position: int, lands: bool) -> bool:
        before, at = draft.flight, draft.flight.index(row) + 1
        stay = original(draft, row, said, position, lands)
        new = draft.flight[-1] if draft.flight else row
        if lands == when and before[at:] and not new.loops:
            draft.flight = [*draft.flight[:-1], replace(before[at], token=new.token), *before[at + 1 :]]
        return stay

    patch.setattr(selfspec.engine.wave, "_hear", fault)


def another_part(patch: pytest.MonkeyPatch, at: int, change: Callable[[KVCache, KVCache], object]) -> None:
    """One loop's cache is changed, by what another's is."""
    original = KVCache.loop

    def fault(self: KVCache, index: int) -> KVCache:
        part = original(self, index)
        if index == at:
            change(part, original(self, 2))
        return part

    patch.setattr(KVCache, "loop", fault)


def _reads(part: KVCache, other: KVCache) -> None:
    part.keys, part.values, part._parts, part.described = other.keys, other.values, other._parts, None


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "one loop is not rolled back": one_loop_is_not_rolled_back,
    "rows behind a rejection stay": lambda patch: rows_behind_a_new_token_stay(patch, True),
    "rows behind a second thought stay": lambda patch: rows_behind_a_new_token_stay(patch, False),
    "a row reads another loop": lambda patch: another_part(patch, 1, _reads),
    "no norm before a loop": lambda patch: another_part(patch, 1, lambda part, _: setattr(part, "loop_index", 0)),
    "a norm too many": lambda patch: another_part(patch, 0, lambda part, _: setattr(part, "loop_index", 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_finds(fault: str, layout: Layout) -> None:
    """And passes without it: `test_alone`."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, ValueError, IndexError)):
        FAULTS[fault](patch)
        check_alone(layout, True, "greedy")


@every_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sweep_that_breaks_off(layout: Layout, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Anywhere, before or after its rows are written: the texts go on as if nothing had happened, also seeded ones."""
    generator, run_layers = looped_generator(layout, prefix_cache=0), LayerSkipModel.run_layers
    call: dict[str, Any] = {"max_new_tokens": 16, "policy": "wave", **options}
    prompts = [PROMPT, [9, 9, 3]]
    expected = [generator.generate(prompt, **call).new_tokens for prompt in prompts]
    for broken in range(2, 40, 3):
        calls, after = count(), {broken + 5, broken + 6}  # the second while rows in flight are written again

        def failing(*given: Any, broken: int = broken, calls: Any = calls, after: Any = after) -> Any:
            call = next(calls)
            found = None if call == broken else run_layers(*given)
            if found is None or call in after:
                raise KeyboardInterrupt if broken % 2 else MemoryError
            return found

        monkeypatch.setattr(LayerSkipModel, "run_layers", failing)
        found: dict[int, list[int]] = {1: [], 2: []}
        with generator.engine() as engine:
            for prompt in prompts:
                engine.add(prompt, **call)
            while len(engine):
                try:
                    for output in engine.step():
                        assert output.error is None
                        found[output.ticket] += output.tokens
                except (KeyboardInterrupt, MemoryError):
                    continue
        assert [*found.values()] == expected


@every_mode
def test_a_processor_s_error_is_one_text_s_own(options: dict[str, Any]) -> None:
    """Tell the tokens before the failure first; drafts that a processor refuses do not count."""
    for length in range(6, 14):
        generator = looped_generator("plain", prefix_cache=0)
        spoiling = wish("wave", logits_processor=LogitsProcessorList([Spoiling(length)]), **options)
        wishes = [spoiling, *(wish(policy, (9, 9, 3)) for policy in ("wave", "ls:2-3"))]
        spoilt, *others = run_together(generator, wishes)
        assert isinstance(spoilt.error, ZeroDivisionError) and len(spoilt.tokens) == length - len(PROMPT)
        for course, one in zip(others, wishes[1:]):
            assert_same(course, run_alone(generator.model, one), rounds=one.policy != "wave", exact=False)


@needs_native
def test_what_a_cancelled_wave_leaves() -> None:
    """A later text goes on from the committed rows: of those in flight nothing is left."""
    for steps in range(2, 12):
        generator = looped_generator("native")
        with generator.engine() as engine:
            ticket = engine.add(PROMPT, max_new_tokens=24, policy="wave")
            said = [token for _ in range(steps) for output in engine.step() for token in output.tokens]
            engine.cancel(ticket)
        prompt = [*PROMPT, *said, 7]
        result = generator.generate(prompt, max_new_tokens=12, policy="wave")
        assert result.stats.num_reused_tokens == len(prompt) - 2
        fresh = looped_generator("native", prefix_cache=0)
        assert result.new_tokens == fresh.generate(prompt, max_new_tokens=12, policy="ar").new_tokens


@every_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_of_all_kinds_in_turn(layout: Layout, options: dict[str, Any]) -> None:
    """Rows in flight are dropped where another kind of round begins, and stay where a wave drafts after another loop."""
    generator, kinds = looped_generator(layout), [wave(loop) for loop in (1, 1, 1, 2, 2, 1, 3)]
    kinds += [Plan(exit_layer=2, max_speculations=3), Plan(exit_layer=None, max_speculations=0)]
    for seed in range(12):
        policy, call = in_turn(*Random(seed).sample(kinds, len(kinds))), {"max_new_tokens": 40, **options}
        found = generator.generate(PROMPT, policy=policy, **call).new_tokens
        assert found == generator.generate(PROMPT, policy=policy if options else "ar", **call).new_tokens


def test_what_is_refused() -> None:
    """By one clear ValueError."""
    for policy in ("wave", "wave:loop=1", in_turn(wave(1))):
        with pytest.raises(ValueError, match="a wave needs a looped model"):
            generator_of("plain").generate(PROMPT, policy=policy)
    looking = in_turn(wave(1))
    looking.exit.observes = ObservationSpec(context_layers=(2,))  # type: ignore[misc]
    refused = {
        "wave:loop=4": r"loop must be an integer in \[1, 3\]",
        "wave+svip": "no stopping",
        looking: "no hidden states",
    }
    for policy, said in refused.items():
        with pytest.raises(ValueError, match=said):
            looped_generator("plain").generate(PROMPT, policy=policy)
