"""An engine for texts that come and go: its surface, what it lets go of, threads."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from batched_runs import LAYOUTS, CacheCount, Wish, assert_same, generator_of, run_alone, run_together, shared_model
from layerskip_models import LayerSkipModel
from layerskip_models.linear import Layout
from policies import parse_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.policy_store import lend
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [5, 1, 7]


# Its surface


def test_an_engine_is_empty_until_texts_join() -> None:
    engine = generator_of("plain").engine()
    assert len(engine) == 0
    assert engine.step() == []
    tickets = [engine.add(PROMPT, max_new_tokens=4, policy="ar") for _ in range(3)]
    assert len(engine) == 3 and len({*tickets}) == 3
    while len(engine):
        engine.step()
    assert engine.step() == []
    late = engine.add(PROMPT, max_new_tokens=1, policy="ar")
    assert late not in tickets
    (progress,) = engine.step()
    assert (progress.ticket, len(progress.tokens), progress.record, progress.error) == (late, 1, None, None)
    assert progress.result is not None and progress.result.stop_reason == "length"
    assert len(engine) == 0
    engine.close()


def test_joining_runs_nothing_and_a_wrong_call_does_not_join() -> None:
    generator = SelfSpecGenerator(shared_model("plain"), policy="ls:2-3")
    with generator.engine() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(generator.model), "run_layers", lambda *_: pytest.fail("ran"))
        engine.add(PROMPT, max_new_tokens=4, policy="ls:2-3")
        for wrong, message in (
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"policy": "dell"}, "unknown policy"),
            ({"exit_layer": 4}, "exit_layer"),
            ({"max_new_tokens": 1000}, "context"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.add(PROMPT, **wrong)
        for wrong, message in (
            ({"max_new_tokn": 3}, "did you mean max_new_tokens"),
            ({"streamer": None}, "no argument 'streamer'(?!: did you mean streamer)"),
            ({"batch_size": 3}, "no argument 'batch_size'"),
        ):
            with pytest.raises(TypeError, match=message):
                engine.add(PROMPT, **wrong)
        assert len(engine) == 1


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
    generator = generator_of("plain")
    policy = parse_policy("fs:2-3", num_layers=4)
    engine = generator.engine()
    with engine:
        for _ in range(3):
            engine.add(PROMPT, max_new_tokens=9, policy=policy)
        engine.step()
        assert len(engine) == 3
    assert len(engine) == 0
    assert engine.step() == []
    with lend(policy) as loan:
        assert loan.policy is policy
    engine.close()  # once more
    with pytest.raises(ZeroDivisionError), generator.engine() as engine:
        engine.add(PROMPT, max_new_tokens=9)
        raise ZeroDivisionError
    assert len(engine) == 0


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
    """A text ends with the weights that it began with; those that join are on the new ones, however often they change.

    Copies that nobody decodes on are let go. (Their passes were found by an address once, which a later copy came to have.)
    """
    llama = tiny_llama(dtype=torch.float64, seed=3)
    others = [tiny_llama(dtype=torch.float64, seed=seed) for seed in (4, 5, 6, 7)]
    texts = [reference_greedy(model, PROMPT, max_new_tokens=14) for model in (*others, llama)]
    current = -1
    generator = SelfSpecGenerator(llama, policy="ls:2-4")
    models: list[weakref.ref[LayerSkipModel]] = []
    with generator.engine() as engine:
        for number in range(14):
            for_batch_size = number % 3 == 0
            expected = [texts[current]]
            got = {engine.add(PROMPT, max_new_tokens=14): list[int]()}
            models.append(weakref.ref(generator.model))
            if for_batch_size:
                for progress in engine.step():
                    got[progress.ticket] += progress.tokens
                current = (number + 2) % 4
                llama.load_state_dict(others[current].state_dict())
                expected.append(texts[current])
                got[engine.add(PROMPT, max_new_tokens=14)] = []
                models.append(weakref.ref(generator.model))
            while len(engine):
                for progress in engine.step():
                    got[progress.ticket] += progress.tokens
            assert [*got.values()] == expected
            current = (number + 1) % 4
            llama.load_state_dict(others[current].state_dict())
            gc.collect()
            assert sum(model() is not None for model in models) <= 2


# Threads


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_engines_in_two_threads_at_once(layout: Layout) -> None:
    """Of one generator, each with several texts, and a policy by name that both use."""
    generator = generator_of(layout)
    texts = [
        Wish(prompt=[number, 3 + number], policy=policy, options={"max_new_tokens": 25, **options}, joins=number)
        for number, (policy, options) in enumerate(
            [
                ("ls:{E}-4", {}),
                ("del", {}),
                ("dv:{E}", {"do_sample": True, "seed": 2}),
                ("ar", {"eos_token_id": [4]}),
                ("auto:cost=layers", {"policy": "auto:cost=layers"}),
            ]
        )
    ]
    expected = [run_alone(shared_model(layout), text) for text in texts]
    errors: list[BaseException] = []

    def work(order: int) -> None:
        try:
            for _ in range(3):
                mine = [replace(text, joins=0 if order > 0 else text.joins) for text in texts[::order]]
                for course, own in zip(run_together(generator, mine, rows=False), expected[::order]):
                    own = replace(own, rows=None, context=None)
                    assert_same(course, own, rounds=own.result.policy != "auto:cost=layers", exact=layout == "native")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(order,)) for order in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


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

    with generator.engine() as engine:
        tickets = [
            engine.add(PROMPT, max_new_tokens=12, policy="ls:2-3", logits_processor=LogitsProcessorList([Asking()])),
            engine.add(PROMPT, max_new_tokens=12, policy="ls:2-3"),
        ]
        got: dict[int, list[int]] = {ticket: [] for ticket in tickets}
        while len(engine):
            for progress in engine.step():
                got[progress.ticket] += progress.tokens
    assert [*got.values(), *inner] == [expected] * 6
