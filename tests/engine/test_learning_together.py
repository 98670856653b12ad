"""What texts of one engine learn together, what each learns for itself, and what a policy is told of its batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from batched_runs import generator_of, shared_model
from policies import Plan, Policy, RoundContext, RoundRecord, ShadowTokens, parse_policy
from policies.auto.constants import TUNING
from preverifiers import random_preverification
from scripted_policies import ScriptedExit, StopBelow, made_up_cost
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.engine.policy_store import lend

PROMPT = [5, 1, 7]


class Together(ScriptedExit):
    """An exit policy whose texts learn in one state, with a stopping rule for each of them."""

    learns_together = True

    def __init__(self) -> None:
        super().__init__([(2, 3), (1, 2)])
        self.rounds = 0

    def default_stopping(self) -> StopBelow:
        return StopBelow(0.3)

    def observe(self, record: RoundRecord) -> None:
        super().observe(record)
        self.rounds += 1


def parts_of(engine: Engine) -> list[Policy]:
    return [slot.sequence.policy for slot in engine._slots.values()]


def is_free(policy: Policy) -> bool:
    with lend(policy) as loan:
        return loan.policy is policy


def test_texts_with_one_policy_that_learns_together_share_its_state() -> None:
    """All their rounds teach it; each has a round of its own at hand. When the last has left it is free again."""
    generator = generator_of("plain")
    exit_policy = Together()
    policy = Policy(exit_policy, exit_policy.default_stopping(), name="together")
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
        with lend(policy) as loan:
            assert loan.policy.exit is not exit_policy
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
    """Whose costs are no timings decide alike in any batch: texts that learned together would not. The first text has the
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


def test_a_policy_is_told_of_its_batch_size() -> None:
    seen: list[int] = []

    class Told(ScriptedExit):
        def plan(self, context: RoundContext) -> Plan:
            seen.append(context.batch_size)
            return super().plan(context)

    generator = generator_of("plain")
    with generator.engine() as engine:
        engine.add(PROMPT, max_new_tokens=12, policy=Policy(Told([(None, 0)])))
        engine.step()
        engine.step()
        others = [engine.add([9], max_new_tokens=30, policy="ar") for _ in range(3)]
        records = [engine.step() for _ in range(3)][-1]
        assert [progress.record.batch_size for progress in records if progress.record] == [4] * 4
        for ticket in others[1:]:
            engine.cancel(ticket)
        engine.step()
    assert seen[0] == 1 and seen[-2:] == [4, 2]


def test_of_texts_that_learn_together_one_learns_in_a_round() -> None:
    """Three texts would else compute three times what one needs, and pay for it where no draft pays."""
    generator = generator_of("plain")
    policies = {
        "together": parse_policy(
            "auto:learn_every=1,copy=off", num_layers=4, measure=lambda: replace(made_up_cost(4), fixed=False)
        ),
        "each for itself": parse_policy("auto:cost=layers,learn_every=1,copy=off", num_layers=4),
    }
    learned: dict[str, list[int]] = {}
    for name, policy in policies.items():
        with generator.engine() as engine:
            for token in (3, 9, 14):
                engine.add([token, 5, 1], max_new_tokens=40, policy=policy, eos_token_id=[])
            steps = [engine.step() for _ in range(8)]
        rounds = [[progress.record for progress in step if progress.record] for step in steps]
        learned[name] = [sum(record.shadow is not None for record in records) for records in rounds if records]
    assert set(learned["together"]) == {1}
    assert set(learned["each for itself"]) == {3}


def test_those_that_join_together_are_told_how_many_they_will_be() -> None:
    """Else the first texts of a batch would learn from their prompts as much as texts alone."""
    told: list[int] = []

    class Told(ScriptedExit):
        def expect_batch_size(self, texts: int) -> None:
            told.append(texts)

    generator = generator_of("plain")
    policies = [Policy(Told([(None, 0)])) for _ in range(5)]
    generator.generate_batch([PROMPT] * 5, max_new_tokens=3, policy=policies, batch_size=3, do_sample=False)
    assert told[:3] == [3, 3, 3]
    assert told[-2:] == [2, 2]  # the last two join when all before them are complete


@pytest.mark.parametrize("batch_size", [1, 2])
def test_texts_that_know_that_drafts_do_not_pay_learn_less(batch_size: int) -> None:
    """And nothing from their prompts."""
    cost = replace(made_up_cost(4), fixed=False)
    policy = parse_policy("auto:learn_every=1,copy=off", num_layers=4, measure=lambda: cost)
    policy.expect_batch_size(batch_size)
    assert policy.observes.prompt_rows > 0
    learner = policy.exit.learner  # type: ignore[attr-defined]
    layers = policy.observes.shadow_layers
    wrong = torch.zeros(len(layers), 2 * TUNING.enough_observations, dtype=torch.long)
    policy.observe_prompt(
        ShadowTokens(layers=layers, tokens=wrong, confidences=wrong + 0.1, target_tokens=wrong[0] + 1)
    )
    assert learner.known >= TUNING.enough_observations
    assert learner.best_drafter is None and not learner.drafting_never_pays
    assert policy.observes.prompt_rows == 0
    context = RoundContext(round_index=0, num_committed=9, remaining_tokens=99, batch_size=batch_size)
    learns = [policy.exit.plan(context).learn for _ in range(batch_size * TUNING.idle_learning_divisor * 10)]
    assert sum(learns) == 10
