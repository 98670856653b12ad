"""Policies of calls at the same time and of texts in one engine: what is shared, what is copied, what they are told."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM

from batched_runs import generator_of, in_threads, shared_model
from policies import MeasuredCost, PacerStopping, Plan, Policy, RoundContext, ShadowTokens, parse_policy
from policies.auto.policy import IDLE_LEARNING, KNOWN
from preverifiers import random_preverification
from records import finished
from scripted_policies import OneText, ScriptedExit, StopBelow, Together, made_up_cost
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.engine.policy_store import PolicyStore, lend
from tiny_llama import reference_greedy

PROMPTS = [[5, 1, 7], [9, 2], [3, 3, 8, 1], [11]]
LENGTH = 16
TIMED = replace(made_up_cost(4), fixed=False)
"""Costs in seconds, as of a machine."""


def parts_of(engine: Engine) -> list[Policy]:
    return [slot.sequence.policy for slot in engine._slots.values()]


def is_free(policy: Policy) -> bool:
    with lend(policy) as loan:
        return loan.policy is policy


@pytest.fixture(scope="module")
def model_s_own(llama64: LlamaForCausalLM) -> list[list[int]]:
    return [reference_greedy(llama64, prompt, max_new_tokens=LENGTH) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["custom", "pacer", "auto", "del", "ls:2-6+spide", "fs:2-3", "dv:2"])
def test_threads_share_a_learning_policy(name: str, engine64: SelfSpecGenerator, model_s_own: list[list[int]]) -> None:
    """Every text is exact, and no policy sees two texts at once."""
    policy: str | Policy = name
    if name == "custom":
        policy = Policy(ScriptedExit([(2, 6)]), OneText())
    elif name == "pacer":
        policy = Policy(ScriptedExit([(2, 6)]), PacerStopping(random_preverification(engine64.model), b=2, t=0.3))

    def work(index: int) -> None:
        for _ in range(2):
            text = engine64.generate(PROMPTS[index], max_new_tokens=LENGTH, policy=policy).new_tokens
            assert text == model_s_own[index]

    in_threads(partial(work, index) for index in range(len(PROMPTS)))


def test_a_call_within_a_call_has_a_copy(engine64: SelfSpecGenerator) -> None:
    """Only the outer call's rounds teach the policy itself; another policy of the same parts is in use, too."""
    options = {"max_new_tokens": LENGTH, "policy": "fs:2-3"}
    alone = SelfSpecGenerator(engine64.model)
    expected = alone.generate(PROMPTS[0], **options).new_tokens
    policy = engine64.resolve_policy("fs:2-3")
    found: list[int] = []
    for piece in engine64.stream(PROMPTS[0], **options):
        found += piece
        if len(found) < LENGTH:  # else it is free again
            engine64.generate(PROMPTS[1], **options)
    assert found == expected
    assert policy.state() == alone.resolve_policy("fs:2-3").state()
    assert engine64.resolve_policy("fs:2-3") is policy

    stopping = OneText()
    one, other = (Policy(ScriptedExit([(2, 6)]), stopping, name=name) for name in ("one", "other"))
    with engine64.stream(PROMPTS[0], max_new_tokens=LENGTH, policy=one) as stream:
        next(stream)
        rounds = stopping.rounds
        engine64.generate(PROMPTS[1], max_new_tokens=LENGTH, policy=other)
        assert stopping.rounds == rounds
        stopping.lock = threading.Lock()  # type: ignore[attr-defined]  # of which there is no copy
        with pytest.raises(RuntimeError, match="policy 'other' is in use by another call"):
            engine64.generate(PROMPTS[1], max_new_tokens=5, policy=other)
    engine64.generate(PROMPTS[1], max_new_tokens=LENGTH, policy=other)
    assert stopping.rounds > rounds


def test_a_store_forgets_the_policy_that_was_not_used_for_the_longest_time() -> None:
    make = partial(parse_policy, num_layers=4)
    store = PolicyStore(most=2)
    first = store.find("ls:1-1", partial(make, "ls:1-1"))
    store.find("ls:1-2", partial(make, "ls:1-2"))
    assert store.find("ls:1-1", partial(make, "ls:2-2")) is first
    store.find("ls:1-3", partial(make, "ls:1-3"))
    assert "ls:1-2" not in store and store["ls:1-1"] is first
    store.keep("ls:1-1", make("ls:2-1"))
    assert store["ls:1-1"].name == "ls:2-1" and "ls:1-3" in store


def test_a_policy_that_cannot_be_made_is_not_kept(engine64: SelfSpecGenerator) -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        engine64.resolve_policy("lss:1-1")
    assert engine64.resolve_policy(" ls:1-1 ") is engine64.resolve_policy("ls:1-1")
    assert engine64.resolve_policy(exit_layer=1, num_speculations=1) is not engine64.resolve_policy("ls:1-1")
    with pytest.raises(ValueError, match="not both"):
        engine64.resolve_policy("auto", exit_layer=1)


def test_texts_with_one_policy_that_learns_together_share_its_state() -> None:
    """All their rounds teach it; each has a round of its own at hand. When the last has left it is free again."""
    generator = generator_of("plain")
    exit_policy = Together()
    policy = Policy(exit_policy, StopBelow(0.3), name="together")
    with generator.engine() as engine:
        for prompt, length in ((PROMPTS[0], 12), (PROMPTS[0], 6), ([9], 12)):
            engine.add(prompt, max_new_tokens=length, policy=policy)
        parts = parts_of(engine)
        assert all(part.exit is exit_policy for part in parts)
        assert len({id(part.stopping) for part in parts}) == 3
        with generator.engine() as other:  # of another engine: a copy, as for any other call
            other.add([9], max_new_tokens=12, policy=policy)
            assert parts_of(other)[0].exit is not exit_policy
        rounds = 0
        while len(engine):
            assert not is_free(policy)
            rounds += sum(progress.record is not None for progress in engine.step())
        assert exit_policy.rounds == rounds > 5
        assert is_free(policy)
        engine.cancel(engine.add(PROMPTS[0], max_new_tokens=5, policy=policy))
        assert is_free(policy)


COPIED = ("ls:2-3", "fs:2-3", "del", "del:cost=measured", "auto:cost=layers", "auto:cost=layers+pacer:b=2", "auto")
TOGETHER = ("auto", "auto+spide", "auto+fs", "auto+pacer:b=2,t=0.3", "auto:d_max=2")


@pytest.mark.parametrize(
    ("name", "costs"), [*((name, made_up_cost(4)) for name in COPIED), *((name, TIMED) for name in TOGETHER)]
)
def test_policies_whose_costs_are_timings_learn_together(name: str, costs: MeasuredCost) -> None:
    """One learner, stopping rules as the name says. Others decide alike in any batch: only the first text has no copy."""
    generator = SelfSpecGenerator(shared_model("plain"))
    network = random_preverification(generator.model)
    policy = parse_policy(name, num_layers=4, measure=lambda: costs, preverifier=lambda _: network)
    together = not costs.fixed
    assert policy.learns_together == together
    with generator.engine() as engine:
        tickets = [engine.add(prompt, max_new_tokens=15, policy=policy) for prompt in PROMPTS[:3]]
        parts = parts_of(engine)
        assert [part.exit is policy.exit for part in parts] == [True, together, together]
        assert all(type(part.stopping) is type(policy.stopping) for part in parts)
        assert policy.stopping is None or len({id(part.stopping) for part in parts}) == 3
        results = {}
        while len(engine):
            results |= {one.ticket: one.result.new_tokens for one in engine.step() if one.result is not None}
    plain = generator.generate_batch(PROMPTS[:3], max_new_tokens=15, policy="ar")
    assert [results[ticket] for ticket in tickets] == [one.new_tokens for one in plain]
    assert is_free(policy)


def test_a_policy_is_told_of_its_batch_size() -> None:
    """Also of those that join with it: else the first texts of a batch would learn from their prompts as texts alone do."""
    seen: list[int] = []
    expected: list[int] = []

    class Told(ScriptedExit):
        def plan(self, context: RoundContext) -> Plan:
            seen.append(context.batch_size)
            return super().plan(context)

        def expect_batch_size(self, texts: int) -> None:
            expected.append(texts)

    generator = generator_of("plain")
    with generator.engine() as engine:
        engine.add(PROMPTS[0], max_new_tokens=12, policy=Policy(Told([(None, 0)])))
        engine.step()
        engine.step()
        others = [engine.add([9], max_new_tokens=30, policy="ar") for _ in range(3)]
        records = [engine.step() for _ in range(3)][-1]
        assert [progress.record.batch_size for progress in records if progress.record] == [4] * 4
        for ticket in others[1:]:
            engine.cancel(ticket)
        engine.step()
    assert seen[0] == 1 and seen[-2:] == [4, 2]
    expected.clear()
    told = [Policy(Told([(None, 0)])) for _ in range(5)]
    generator.generate_batch([PROMPTS[0]] * 5, max_new_tokens=3, policy=told, batch_size=3, do_sample=False)
    assert expected == [3, 3, 3, 2, 2]  # the last two join when all before them are complete


def test_of_texts_that_learn_together_one_learns_in_a_round() -> None:
    """Three texts would else compute three times what one needs, and pay for it where no draft pays."""
    policy = parse_policy("auto:copy=off", num_layers=4, measure=lambda: replace(TIMED, head_seconds=(1e-9, 1e-9)))
    with generator_of("plain").engine() as engine:
        for token in (3, 9, 14):
            engine.add([token, 5, 1], max_new_tokens=40, policy=policy, eos_token_id=[])
        steps = [[one.record for one in engine.step() if one.record] for _ in range(30)]
    assert {sum(record.shadow is not None for record in records) for records in steps if records} == {0, 1}


def test_texts_that_know_that_drafts_do_not_pay_learn_less() -> None:
    """Nothing from prompts, and in rounds as much as one text alone."""
    policy = parse_policy("auto:copy=off", num_layers=4, measure=lambda: TIMED)
    layers = policy.observes.shadow_layers
    tokens = torch.zeros(len(layers), 2 * KNOWN, dtype=torch.long)
    wrong = ShadowTokens(layers=layers, tokens=tokens, confidences=tokens + 0.1, target_tokens=tokens[0] + 1)
    policy.observe_prompt(wrong)
    for _ in range(3000):
        policy.observe(replace(finished(0, 0, cause="none"), exit_layer=None))
    assert policy.observes.prompt_rows == 0
    policy.expect_batch_size(2)
    assert 0 < policy.exit._share <= IDLE_LEARNING  # type: ignore[attr-defined]
