"""An engine for texts that come and go: its surface, errors of one text, learning together, threads."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from companies import Wish, assert_same, run_alone, run_together
from preverifiers import random_preverification
from scripted_policies import ScriptedExit, StopBelow, made_up_cost
from test_judge import From
from test_many_texts import LAYOUTS, generator_of, shared_model
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import selfspec.runtime.runner_pool
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from policies import DraftRow, Needs, NeverStop, Plan, Policy, RoundContext, RoundRecord, ShadowTokens, parse_policy
from selfspec import NonFiniteLogitsError, SelfSpecGenerator
from selfspec.engine import Engine
from selfspec.runtime.policy_use import use

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
        with pytest.raises(TypeError, match="streamer"):
            engine.add(PROMPT, streamer=None)
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
    with use(policy) as (free, _):
        assert free is policy
    engine.close()  # once more
    with pytest.raises(ZeroDivisionError), generator.engine() as engine:
        engine.add(PROMPT, max_new_tokens=9)
        raise ZeroDivisionError
    assert len(engine) == 0


class CacheCount:
    """The KV caches that a pool has made, and how many of them still exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[weakref.ref[KVCache]] = []
        monkeypatch.setattr(selfspec.runtime.runner_pool, "KVCache", self._make)

    def _make(self, *arguments: Any) -> KVCache:
        cache = KVCache(*arguments)
        self.made.append(weakref.ref(cache))
        return cache

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(cache() is not None for cache in self.made)


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
                assert caches.alive <= len(engine) + 1
        made = len(caches.made)
        engine.add(PROMPT, max_new_tokens=30)
        assert len(caches.made) == made


def test_new_weights_between_two_texts_of_an_engine() -> None:
    """A text ends with the weights that it began with; those that join are on the new ones, however often they change.

    Copies that nobody decodes on are let go. (Their passes were found by an address once, which a later copy came to have.)
    """
    llama = tiny_llama(dtype=torch.float64, seed=3)
    weights = [tiny_llama(dtype=torch.float64, seed=seed).state_dict() for seed in (4, 5, 6, 7)]
    generator = SelfSpecGenerator(llama, policy="ls:2-4")
    models: list[weakref.ref[LayerSkipModel]] = []
    with generator.engine() as engine:
        for number in range(24):
            in_company = number % 3 == 0
            expected = [reference_greedy(llama, PROMPT, max_new_tokens=14)]
            got = {engine.add(PROMPT, max_new_tokens=14): list[int]()}
            models.append(weakref.ref(generator.model))
            if in_company:
                for progress in engine.step():
                    got[progress.ticket] += progress.tokens
                llama.load_state_dict(weights[number % 4])
                expected.append(reference_greedy(llama, PROMPT, max_new_tokens=14))
                got[engine.add(PROMPT, max_new_tokens=14)] = []
                models.append(weakref.ref(generator.model))
            while len(engine):
                for progress in engine.step():
                    got[progress.ticket] += progress.tokens
            assert [*got.values()] == expected
            llama.load_state_dict(weights[(number + 1) % 4])
            gc.collect()
            assert sum(model() is not None for model in models) <= 2


# Errors of one text


class Faulty(ScriptedExit):
    """Fails in one of an exit policy's methods, in its third round."""

    def __init__(self, where: str) -> None:
        super().__init__([(2, 3)], Needs(shadow_layers=(1, 2), prompt_rows=2))
        self.where = where

    def _fail(self, where: str, number: int = 2) -> None:
        if (where, number) == (self.where, 2):
            raise ZeroDivisionError(f"a fault in {where}")

    def plan(self, context: RoundContext) -> Plan:
        self._fail("plan", context.round_index)
        if self.where == "a wrong layer" and context.round_index == 2:
            return Plan(exit_layer=4, max_speculations=3)
        return super().plan(context)

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        self._fail("observe_prompt")

    def observe(self, record: RoundRecord) -> None:
        self._fail("observe", record.index)


class FaultyStop(NeverStop):
    """Fails in one of a stopping policy's methods, in its third round and at its second row."""

    def __init__(self, where: str) -> None:
        self.where, self.round = where, -1

    def _fail(self, where: str) -> None:
        if where == self.where and self.round == 2:
            raise ZeroDivisionError(f"a fault in {where}")

    def start_round(self, plan: Plan) -> None:
        self.round += 1
        self._fail("start_round")

    def stop_before_draw(self, row: DraftRow) -> bool:
        if row.num_drafted == 1:
            self._fail("stop_before_draw")
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        if row.num_drafted == 1:
            self._fail("stop_after_draw")
        return False

    def threshold(self, exit_layer: int) -> None:
        self._fail("threshold")

    def spent(self) -> Any:
        self._fail("spent")
        return super().spent()


class Raising(LogitsProcessor):
    """A fault of its own, whatever the text is once it has some length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise ZeroDivisionError("a fault of a processor")
        return scores


class RaisingCriterion(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] >= 9:
            raise ZeroDivisionError("a fault of a criterion")
        return False


EXIT_FAULTS = ("plan", "a wrong layer", "observe_prompt", "observe")
STOP_FAULTS = ("start_round", "threshold", "stop_before_draw", "stop_after_draw", "spent")


def with_fault(kind: str) -> dict[str, Any]:
    """Arguments of a call that fails some tokens into its text."""
    if kind in EXIT_FAULTS:
        return {"policy": Policy(Faulty(kind))}
    if kind in STOP_FAULTS:
        return {"policy": Policy(ScriptedExit([(2, 3)]), FaultyStop(kind))}
    if kind == "a criterion":
        return {"stopping_criteria": StoppingCriteriaList([RaisingCriterion()]), "policy": "ls:2-3"}
    processors = {"a processor": Raising(9), "at the first token": Raising(3), "NaN": From(9, "nan")}
    return {"logits_processor": LogitsProcessorList([processors[kind]]), "policy": "ls:2-3"}


KINDS = (*EXIT_FAULTS, *STOP_FAULTS, "a criterion", "a processor", "at the first token", "NaN")


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_text_is_that_text_s_alone(
    kind: str, layout: Layout, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have the same tokens by the same rounds, bit for bit on our kernels; caches are given back."""
    model = shared_model(layout)
    caches = CacheCount(monkeypatch)
    generator = generator_of(layout)
    common = {"max_new_tokens": 20, "do_sample": do_sample, "seed": 4 if do_sample else None}
    bad = Wish(prompt=PROMPT, options={**common, **with_fault(kind)})
    texts = [
        Wish(prompt=PROMPT, policy="ls:{E}-4", options=common),
        Wish(prompt=[2, 2, 8, 1], policy="dv:{E}", options=common),
        Wish(prompt=[11], policy="changing plans", options=common, joins=2),
    ]
    first, failed, *others = run_together(generator, [texts[0], bad, *texts[1:]])
    wanted = NonFiniteLogitsError if kind == "NaN" else ValueError if kind == "a wrong layer" else ZeroDivisionError
    assert isinstance(failed.error, wanted), failed.error
    assert failed.result is None
    failed.error.__traceback__ = None  # whose frames know the texts
    assert caches.alive == 1
    for text, course in zip(texts, [first, *others]):
        assert_same(course, run_alone(model, text), exact=layout == "native")
        assert len(course.tokens) == 20
    alone = run_together(generator_of(layout), [replace(bad, options={**common, **with_fault(kind)})])[0]
    assert isinstance(alone.error, wanted)
    assert failed.tokens == alone.tokens
    again = run_together(generator, texts[:1])[0]
    assert_same(again, first, exact=layout == "native")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_of_one_text_s_rows_is_that_text_s_alone(layout: Layout) -> None:
    """A token without an embedding: a text that comes to it fails there, and one that only drafts it goes on."""
    dtype = torch.float32 if layout == "native" else torch.float64
    llama = tiny_llama(heads=4, kv_heads=2, late_scale=0.9, dtype=dtype, seed=21)
    sound = from_transformers(llama, layout=layout)
    texts = [
        Wish(prompt=[number, 5], policy=policy, options={"max_new_tokens": 24})
        for number in range(7)
        for policy in ("ls:{E}-6", "ar", "stop before a draw")
    ]
    expected = [run_alone(sound, text) for text in texts]
    failures = drafted = 0
    for token in range(7, 24):
        with torch.no_grad():
            llama.model.embed_tokens.weight[token], kept = torch.nan, llama.model.embed_tokens.weight[token].clone()
            model = from_transformers(llama, layout=layout)
            llama.model.embed_tokens.weight[token] = kept
        for part in (slice(0, 6), slice(6, 12), slice(12, None)):
            courses = run_together(SelfSpecGenerator(model, tiny_tokenizer()), texts[part])
            for course, own in zip(courses, expected[part]):
                assert own.result is not None and own.result.trace is not None
                if token in own.tokens[:-1]:
                    assert isinstance(course.error, NonFiniteLogitsError)
                    assert course.tokens == own.tokens[: own.tokens.index(token) + 1]
                    failures += 1
                else:
                    assert_same(course, own, rounds=False, exact=layout == "native")
                    drafted += any(token in record.draft_tokens for record in own.result.trace)
    assert min(failures, drafted) > 5


def test_an_error_of_what_all_need_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory, say: nobody is blamed, and the engine can be closed."""
    generator = generator_of("plain")
    with generator.engine() as engine:
        for _ in range(2):
            engine.add(PROMPT, max_new_tokens=9, policy="ar")
        engine.step()
        engine.step()
        monkeypatch.setattr(type(generator.model), "run_layers", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError, match="full"):
            engine.step()
        monkeypatch.undo()
    assert generator.generate(PROMPT, max_new_tokens=9, policy="ar").stats.num_new_tokens == 9


# Learning


class Together(ScriptedExit):
    """An exit policy whose texts learn in one state, with a stopping rule for each of them."""

    learns_together = True

    def __init__(self) -> None:
        super().__init__([(2, 3), (1, 2)])
        self.rounds = 0

    def own_stopping(self) -> StopBelow:
        return StopBelow(0.3)

    def observe(self, record: RoundRecord) -> None:
        super().observe(record)
        self.rounds += 1


def parts_of(engine: Engine) -> list[Policy]:
    return [seat.text.policy for seat in engine._seats.values()]


def is_free(policy: Policy) -> bool:
    with use(policy) as (found, _):
        return found is policy


def test_texts_with_one_policy_that_learns_together_share_its_state() -> None:
    """All their rounds teach it; each has a round of its own at hand. When the last has left it is free again."""
    generator = generator_of("plain")
    exit_policy = Together()
    policy = Policy(exit_policy, exit_policy.own_stopping(), name="together")
    with generator.engine() as engine:
        for length in (12, 6):
            engine.add(PROMPT, max_new_tokens=length, policy=policy)
        engine.step()
        engine.step()
        engine.add([9], max_new_tokens=12, policy=policy)
        parts = parts_of(engine)
        assert all(part.exit is exit_policy for part in parts)
        assert len({id(part.stopping) for part in parts}) == 3
        with generator.engine() as other:  # of another engine: a copy, as for any other call
            other.add([9], max_new_tokens=12, policy=policy)
            assert parts_of(other)[0].exit is not exit_policy
        with use(policy) as (copied, _):
            assert copied.exit is not exit_policy
        rounds = 0
        results = {}
        while len(engine):
            assert not is_free(policy)
            for progress in engine.step():
                rounds += progress.record is not None
                results[progress.ticket] = progress.result
        assert is_free(policy)
        assert all(result is not None and result.policy == "together" for result in results.values())
        assert exit_policy.rounds >= rounds > 5
        engine.add(PROMPT, max_new_tokens=5, policy=policy)
        engine.cancel(3)
        engine.cancel(4)
        assert is_free(policy)


@pytest.mark.parametrize("name", ["auto", "auto+spide", "auto+fs", "auto+pacer:b=2,t=0.3", "auto:learn_every=1"])
def test_auto_learns_together_with_what_stops_it(name: str) -> None:
    """With costs in seconds: the learner is one, and every text keeps the kind of stopping rule that its name says."""
    model = shared_model("plain")
    generator = SelfSpecGenerator(model)
    measured = replace(made_up_cost(4), fixed=False)
    policy = parse_policy(
        name, num_layers=4, measure=lambda: measured, preverifier=lambda _: random_preverification(model)
    )
    assert policy.learns_together
    prompts = [PROMPT, [9, 9], [2, 7, 7]]
    expected = [generator.generate(prompt, max_new_tokens=15, policy="ar").new_tokens for prompt in prompts]
    got: dict[int, list[int]] = {}
    with generator.engine() as engine:
        for prompt in prompts:
            got[engine.add(prompt, max_new_tokens=15, policy=policy)] = []
        parts = parts_of(engine)
        assert all(part.exit is policy.exit for part in parts)
        assert all(type(part.stopping) is type(policy.stopping) for part in parts)
        assert len({id(part.stopping) for part in parts}) == 3
        while len(engine):
            for progress in engine.step():
                got[progress.ticket] += progress.tokens
    assert [*got.values()] == expected
    assert is_free(policy)


@pytest.mark.parametrize(
    "name", ["ls:2-3", "fs:2-3", "del", "del:cost=measured", "auto:cost=layers", "auto:cost=layers+pacer:b=2", "auto"]
)
def test_other_policies_are_copied(name: str) -> None:
    """Whose costs are no timings decide alike in any company: texts that learned together would not. The first text has the
    policy itself, the others copies."""
    model = shared_model("plain")
    policy = parse_policy(
        name,
        num_layers=4,
        measure=partial(made_up_cost, 4),  # fixed: for runs that must decide alike
        preverifier=lambda _: random_preverification(model),
    )
    assert not policy.learns_together
    with SelfSpecGenerator(model).engine() as engine:
        for _ in range(3):
            engine.add(PROMPT, max_new_tokens=9, policy=policy)
        assert [part.exit is policy.exit for part in parts_of(engine)] == [True, False, False]
        while len(engine):
            engine.step()
    assert is_free(policy)


def test_a_policy_is_told_of_its_company() -> None:
    seen: list[int] = []

    class Told(ScriptedExit):
        def plan(self, context: RoundContext) -> Plan:
            seen.append(context.company)
            return super().plan(context)

    generator = generator_of("plain")
    with generator.engine() as engine:
        engine.add(PROMPT, max_new_tokens=12, policy=Policy(Told([(None, 0)])))
        engine.step()
        engine.step()
        others = [engine.add([9], max_new_tokens=30, policy="ar") for _ in range(3)]
        records = [engine.step() for _ in range(3)][-1]
        assert [progress.record.company for progress in records if progress.record] == [4] * 4
        for ticket in others[1:]:
            engine.cancel(ticket)
        engine.step()
    assert seen[0] == 1 and seen[-2:] == [4, 2]


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
                for course, own in zip(run_together(generator, mine), expected[::order]):
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
