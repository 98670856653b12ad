"""Decoding along the diagonal: how many sweeps a token takes, what breaks off in flight, and what is refused."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

import pytest
from transformers import LogitsProcessorList

import selfspec.engine.wave
from batched_runs import (
    LAYOUTS,
    Wish,
    assert_same,
    generator_of,
    looped_generator,
    needs_native,
    run_alone,
    run_together,
)
from callbacks import Spoiling
from layerskip_models import LayerSkipModel
from layerskip_models.linear import Layout
from policies import ObservationSpec, Plan, Policy
from scripted_policies import ScriptedExit
from selfspec.detokenize import token_sources
from selfspec.engine.draft import Draft
from selfspec.engine.wave import Row

PROMPT = [3, 1, 4, 1]
every_mode = pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 11, "top_k": 9}], ids=["greedy", "seeded"]
)


def in_turn(*plans: Plan) -> Policy:
    exits = ScriptedExit([])
    exits._plans = [*plans]
    return Policy(exits)


def wave(loop: int) -> Plan:
    return Plan(exit_layer=None, max_speculations=0, wave=loop)


@pytest.mark.parametrize("agreement", [0.8, 0.9, 1.0])
def test_sweeps_a_token(agreement: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts that are right as often as said. After a right one the next token takes one sweep, else one a loop."""
    generator, random = looped_generator("plain"), Random(1)
    text = generator.generate(PROMPT, max_new_tokens=301, policy="ar").sequences[0].tolist()

    def replayed(draft: Draft, said: Any) -> None:
        position = draft.sequence.length + len(draft.block) + len(draft.flight) - 1
        if position + 1 < len(text):
            draft.flight.append(Row(token=(text[position] + (random.random() >= agreement)) % 24))

    monkeypatch.setattr(selfspec.engine.wave, "_draft", replayed)
    result = generator.generate(PROMPT, max_new_tokens=301, policy="wave", trace=True)
    assert result.sequences[0].tolist() == text and result.trace is not None
    sweeps = 4 + sum(1 if record.num_accepted else 4 for record in result.trace[:-1])
    assert result.stats.loaded_layers == 2 * sweeps
    assert abs(sweeps / 300 - (agreement + (1 - agreement) * 4)) < 0.1
    for record in result.trace:
        shown = [token for token, source in token_sources(record) if source != "rejected"]
        assert shown == [*record.tokens] and record.exit_layer in (2, None)
    assert result.stats.num_drafted == sum(record.num_drafted for record in result.trace)


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

        def failing(
            model: LayerSkipModel, *rest: Any, broken: int = broken, calls: Any = calls, after: Any = after
        ) -> Any:
            call = next(calls)
            found = None if call == broken else run_layers(model, *rest)
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
    """What comes before it is told first; drafts that a processor refuses are none."""
    for length in range(6, 14):
        generator = looped_generator("plain", prefix_cache=0)
        spoiling = {"logits_processor": LogitsProcessorList([Spoiling(length)]), "max_new_tokens": 20, **options}
        wishes = [Wish(prompt=PROMPT, policy="wave", options=spoiling)]
        wishes += [
            Wish(prompt=[9, 9, 3], policy=policy, options={"max_new_tokens": 20}) for policy in ("wave", "ls:2-3")
        ]
        spoilt, *others = run_together(generator, wishes)
        assert isinstance(spoilt.error, ZeroDivisionError) and len(spoilt.tokens) == length - len(PROMPT)
        for course, wish in zip(others, wishes[1:]):
            assert_same(course, run_alone(generator.model, wish), rounds=wish.policy != "wave", exact=False)


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
