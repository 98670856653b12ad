"""Calls at the same time share a policy's name, not its state."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LlamaForCausalLM

from layerskip_models import from_transformers
from policies import DraftRow, PacerStopping, Plan, Policy, parse_policy
from preverifiers import random_preverification
from scripted_policies import ScriptedExit, StopBelow
from selfspec import SelfSpecGenerator
from selfspec.engine.policy_store import PolicyStore
from tiny_llama import reference_greedy, tiny_llama

PROMPTS = [[5, 1, 7], [9, 2], [3, 3, 8, 1], [11]]
LENGTH = 24
SHORT = 16


class OneText(StopBelow):
    """Fails when another text's rows come between the start of a round and its end, as a policy with a state might."""

    def __init__(self) -> None:
        super().__init__(0.2)
        self.next_row = 0
        self.rounds = 0

    def start_round(self, plan: Plan) -> None:
        self.next_row = 0
        self.rounds += 1

    def stop_before_draw(self, row: DraftRow) -> bool:
        assert row.num_drafted == self.next_row, "another text's round"
        self.next_row += 1
        return super().stop_before_draw(row)


@pytest.fixture(scope="module")
def model_s_own(llama64: LlamaForCausalLM) -> list[list[int]]:
    return [reference_greedy(llama64, prompt, max_new_tokens=SHORT) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["custom", "pacer", "auto", "del", "ls:2-6+spide", "fs:2-3", "dv:2"])
def test_threads_share_a_learning_policy(name: str, llama64: LlamaForCausalLM, model_s_own: list[list[int]]) -> None:
    """Every text is exact, and no policy sees two texts at once."""
    engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"))
    policy: str | Policy = name
    if name == "custom":
        policy = Policy(ScriptedExit([(2, 6)]), OneText())
    elif name == "pacer":
        policy = Policy(ScriptedExit([(2, 6)]), PacerStopping(random_preverification(engine.model), b=2, t=0.3))
    expected = model_s_own
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(2):
                text = engine.generate(PROMPTS[index], max_new_tokens=SHORT, policy=policy).new_tokens
                assert text == expected[index]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_a_call_within_a_call_has_a_copy() -> None:
    """It knows what was learned before; only the outer call's rounds teach the policy itself."""
    engine = SelfSpecGenerator(tiny_llama(dtype=torch.float64, seed=3), policy="fs:2-3")
    policy = engine.policy
    alone = SelfSpecGenerator(engine.model, policy="fs:2-3")
    texts = [alone.generate(PROMPTS[0], max_new_tokens=LENGTH).new_tokens]
    learned = alone.policy.state()
    stream = engine.stream(PROMPTS[0], max_new_tokens=LENGTH)
    text = next(stream)
    for piece in stream:
        inner = engine.generate(PROMPTS[1], max_new_tokens=9)
        assert inner.policy == "fs:2-3"
        text += piece
    assert text == texts[0]
    assert policy.state() == learned
    assert engine.policy is policy


def test_another_policy_of_the_same_parts_is_in_use_too() -> None:
    exit_policy, stopping = ScriptedExit([(2, 6)]), OneText()
    one, other = (Policy(exit_policy, stopping, name=name) for name in ("one", "other"))
    engine = SelfSpecGenerator(tiny_llama(dtype=torch.float64, seed=3))
    stream = engine.stream(PROMPTS[0], max_new_tokens=LENGTH, policy=one)
    next(stream)
    rounds = stopping.rounds
    engine.generate(PROMPTS[1], max_new_tokens=LENGTH, policy=other)
    assert stopping.rounds == rounds
    stream.close()
    engine.generate(PROMPTS[1], max_new_tokens=LENGTH, policy=other)
    assert stopping.rounds > rounds


def test_a_policy_that_cannot_be_copied_says_so() -> None:
    policy = Policy(ScriptedExit([(2, 6)]), OneText(), name="mine")
    policy.stopping.lock = threading.Lock()  # type: ignore[union-attr]
    engine = SelfSpecGenerator(tiny_llama(dtype=torch.float64, seed=3), policy=policy)
    stream = engine.stream(PROMPTS[0], max_new_tokens=LENGTH)
    next(stream)
    with pytest.raises(RuntimeError, match="policy 'mine' is in use by another call"):
        engine.generate(PROMPTS[1], max_new_tokens=5)
    stream.close()
    assert engine.generate(PROMPTS[1], max_new_tokens=5).stats.num_new_tokens == 5


def test_a_store_forgets_the_policy_that_was_not_used_for_the_longest_time() -> None:
    made: list[str] = []

    def make(name: str) -> Policy:
        made.append(name)
        return parse_policy(name, num_layers=4)

    store = PolicyStore(most=2)
    first = store.find("ls:1-1", lambda: make("ls:1-1"))
    store.find("ls:1-2", lambda: make("ls:1-2"))
    assert store.find("ls:1-1", lambda: make("ls:1-1")) is first
    store.find("ls:1-3", lambda: make("ls:1-3"))
    assert "ls:1-2" not in store and store["ls:1-1"] is first
    store.keep("ls:1-1", make("ls:2-1"))
    assert store["ls:1-1"].name == "ls:2-1" and "ls:1-3" in store
    assert made == ["ls:1-1", "ls:1-2", "ls:1-3", "ls:2-1"]


def test_a_policy_that_cannot_be_made_is_not_kept() -> None:
    engine = SelfSpecGenerator(tiny_llama(num_layers=4, seed=3))
    with pytest.raises(ValueError, match="unknown policy"):
        engine.resolve_policy("lss:1-1")
    assert engine.resolve_policy(" ls:1-1 ") is engine.resolve_policy("ls:1-1")
    assert engine.resolve_policy(exit_layer=1, num_speculations=1) is not engine.resolve_policy("ls:1-1")
    with pytest.raises(ValueError, match="not both"):
        engine.resolve_policy("auto", exit_layer=1)
