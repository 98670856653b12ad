"""Decoding along the diagonal: how many sweeps a token takes, what breaks off in flight, and what is refused."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

import pytest
from torch import Tensor
from transformers import LogitsProcessorList

import selfspec.engine.wave
from batched_runs import LAYOUTS, Wish, assert_same, generator_of, needs_native, run_alone, run_together
from callbacks import Spoiling
from layerskip_models import LayerSkipModel
from layerskip_models.linear import Layout
from looped_llama import looped_llama
from policies import ObservationSpec, Plan, Policy
from scripted_policies import ScriptedExit
from selfspec import SelfSpecGenerator
from selfspec.detokenize import token_sources
from selfspec.engine.draft import Draft
from selfspec.engine.wave import Row
from tiny_llama import tiny_tokenizer

PROMPT = [3, 1, 4, 1]
SEEDED = {"do_sample": True, "seed": 11, "top_k": 9}
every_mode = pytest.mark.parametrize("options", [{}, SEEDED], ids=["greedy", "seeded"])


def generator_on(layout: Layout, **options: Any) -> SelfSpecGenerator:
    return SelfSpecGenerator(looped_llama(layout, normed=True), tiny_tokenizer(), **options)


@pytest.mark.parametrize("agreement", [0.8, 0.9, 1.0])
def test_sweeps_a_token(agreement: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts that are right as often as said. After a right one the next token takes one sweep, else one a loop."""
    model = looped_llama("plain", max_position_embeddings=512)
    generator, random = SelfSpecGenerator(model, tiny_tokenizer()), Random(1)
    text = generator.generate(PROMPT, max_new_tokens=301, policy="ar").sequences[0].tolist()

    def replayed(draft: Draft, said: Any) -> None:
        position = draft.sequence.length + len(draft.block) + len(draft.flight) - 1
        if position + 1 < len(text):
            draft.flight.append(Row(token=(text[position] + (random.random() >= agreement)) % model.vocab_size))

    monkeypatch.setattr(selfspec.engine.wave, "_draft", replayed)
    result = generator.generate(PROMPT, max_new_tokens=301, policy="wave", trace=True)
    assert result.sequences[0].tolist() == text and result.trace is not None
    hits = [record.num_accepted > 0 for record in result.trace]
    sweeps = model.num_loops + sum(1 if hit else model.num_loops for hit in hits[:-1])
    assert result.stats.loaded_layers == sweeps * model.loop_layers
    assert abs(sweeps / 300 - (agreement + (1 - agreement) * model.num_loops)) < 0.2
    print(f"agreement {agreement}: {sweeps / 300:.3f} sweeps a token")


@every_mode
def test_records_and_statistics(options: dict[str, Any]) -> None:
    generator = SelfSpecGenerator(looped_llama("plain"), tiny_tokenizer())
    result = generator.generate(PROMPT, max_new_tokens=30, policy="wave", trace=True, **options)
    records, stats = result.trace, result.stats
    assert records is not None and [token for one in records for token in one.tokens] == result.new_tokens[1:]
    for record in records:
        assert record.exit_layer in (2, None) and record.loaded_layers in (2, 4, 6, 8)
        assert record.tokens[: record.num_accepted] == record.draft_tokens[: record.num_accepted]
        shown = [token for token, source in token_sources(record) if source != "rejected"]
        assert shown == [*record.tokens]
    assert stats.num_drafted == sum(record.num_drafted for record in records) > stats.num_accepted > 0
    assert stats.rounds == 29 and stats.etpl == 29 / stats.loaded_layers > 1 / 8


@every_mode
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_sweep_that_breaks_off(
    error: type[BaseException], layout: Layout, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere, before or after its rows are written: the texts go on as if nothing had happened, also seeded ones."""
    generator, run_layers = generator_on(layout, prefix_cache=0), LayerSkipModel.run_layers
    call: dict[str, Any] = {"max_new_tokens": 16, "policy": "wave", **options}
    prompts = [PROMPT, [9, 9, 3]]
    expected = [generator.generate(prompt, **call).new_tokens for prompt in prompts]
    for broken in range(2, 40, 3):
        calls, before, after = (
            count(),
            {broken},
            {broken + 5, broken + 6},
        )  # also while rows in flight are written again

        def failing(
            model: LayerSkipModel, *rest: Any, calls: Any = calls, before: Any = before, after: Any = after
        ) -> Tensor:
            call = next(calls)
            found = None if call in before else run_layers(model, *rest)
            if found is None or call in after:
                raise error
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
    model = looped_llama("plain", normed=True)
    for length in range(6, 14):
        spoiling = {"logits_processor": LogitsProcessorList([Spoiling(length)]), "max_new_tokens": 20, **options}
        wishes = [Wish(prompt=PROMPT, policy="wave", options=spoiling)]
        wishes += [
            Wish(prompt=[9, 9, 3], policy=policy, options={"max_new_tokens": 20}) for policy in ("wave", "ls:2-3")
        ]
        generator = SelfSpecGenerator(model, tiny_tokenizer(), prefix_cache=0)
        spoilt, *others = run_together(generator, wishes)
        assert isinstance(spoilt.error, ZeroDivisionError) and len(spoilt.tokens) == length - len(PROMPT)
        for course, wish in zip(others, wishes[1:]):
            assert_same(course, run_alone(model, wish), rounds=wish.policy != "wave", exact=False)


@needs_native
def test_what_a_cancelled_wave_leaves() -> None:
    """A later text goes on from the committed rows: of those in flight nothing is left."""
    for steps in range(2, 12):
        generator = generator_on("native")
        with generator.engine() as engine:
            ticket = engine.add(PROMPT, max_new_tokens=24, policy="wave")
            said = [token for _ in range(steps) for output in engine.step() for token in output.tokens]
            engine.cancel(ticket)
        prompt = [*PROMPT, *said, 7]
        result = generator.generate(prompt, max_new_tokens=12, policy="wave")
        assert result.stats.num_reused_tokens == len(prompt) - 2
        assert (
            result.new_tokens
            == generator_on("native", prefix_cache=0).generate(prompt, max_new_tokens=12, policy="ar").new_tokens
        )


@every_mode
def test_plans_of_all_kinds_in_turn(options: dict[str, Any]) -> None:
    """Rows in flight are dropped where another kind of round begins, and are not where the wave drafts after another loop."""
    generator = generator_on("native" if len(LAYOUTS) > 1 else "plain")
    kinds = [Plan(exit_layer=None, max_speculations=0, wave=loop) for loop in (1, 1, 1, 2, 2, 1, 3)]
    kinds += [Plan(exit_layer=2, max_speculations=3), Plan(exit_layer=None, max_speculations=0)]
    for seed in range(12):
        exits = ScriptedExit([])
        exits._plans = Random(seed).sample(kinds, len(kinds))
        call: dict[str, Any] = {"max_new_tokens": 40, **options}
        found = generator.generate(PROMPT, policy=Policy(exits), **call).new_tokens
        again = generator.generate(PROMPT, policy="ar" if not options else Policy(exits), **call).new_tokens
        assert found == again


def test_what_is_refused() -> None:
    """By one clear ValueError."""
    for name in ("wave", "wave:loop=1"):
        with pytest.raises(ValueError, match="a wave needs a looped model"):
            generator_of("plain").generate(PROMPT, policy=name)
    own = ScriptedExit([])
    own._plans = [Plan(exit_layer=None, max_speculations=0, wave=1)]
    with pytest.raises(ValueError, match="a wave needs a looped model"):
        generator_of("plain").generate(PROMPT, policy=Policy(own))
    looped = generator_on("plain")
    own.observes = ObservationSpec(context_layers=(2,))
    with pytest.raises(ValueError, match="keeps no hidden states"):
        looped.generate(PROMPT, policy=Policy(own))
    for name, said in {
        "wave:loop=4": r"loop must be an integer in \[1, 3\]",
        "wave+svip": "no stopping policy",
    }.items():
        with pytest.raises(ValueError, match=said):
            looped.generate(PROMPT, policy=name)
