"""A call keeps the model and the runner that it began with, whatever happens to the weights or to other calls meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from layerskip_models import from_transformers
from layerskip_models.fork_safe import fork_safe
from policies import Plan, Policy, RoundContext
from scripted_policies import ScriptedExit
from selfspec import SelfSpecGenerator
from selfspec.engine.policy_store import lend
from test_generator import Recorder
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [5, 1, 7]
LENGTH = 20


@cache
def text_of(seed: int) -> list[int]:
    return reference_greedy(tiny_llama(dtype=torch.float64, seed=seed), PROMPT, max_new_tokens=LENGTH)


def old_and_new() -> tuple[LlamaForCausalLM, dict[str, Tensor], list[int], list[int]]:
    """A model, other weights for it, and what it says with either."""
    llama, other = (tiny_llama(dtype=torch.float64, seed=seed) for seed in (3, 4))
    assert text_of(3) != text_of(4)
    return llama, other.state_dict(), text_of(3), text_of(4)


class Acting(Recorder):
    """Calls something at its n-th `put`; the first one brings the prompt."""

    def __init__(self, at: int, action: Any) -> None:
        super().__init__()
        self.at, self.action = at, action

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.pieces) == self.at:
            self.action()


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "with a call between"])
def test_weights_updated_while_a_call_runs(at: int, nested: bool) -> None:
    """The call ends with the weights it began with; later calls run prefill and rounds on the new ones alone."""
    llama, weights, old, new = old_and_new()
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    between: list[list[int]] = []

    def update() -> None:
        llama.load_state_dict(weights)
        if nested:
            between.append(engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens)

    result = engine.generate(PROMPT, max_new_tokens=LENGTH, streamer=Acting(at, update))
    assert result.new_tokens == old
    assert between == [new] * nested
    for _ in range(2):
        assert engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens == new


def test_threads_share_a_generator_while_its_weights_change() -> None:
    """Every text is of the old weights or of the new ones, never of both; once all know, of the new ones."""
    llama, weights, old, new = old_and_new()
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    texts: list[list[int]] = []
    updated = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(12):
                known = updated.is_set()
                text = engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens
                assert text == new or (not known and text == old)
                texts.append(text)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(texts) < 6 and not errors:
        time.sleep(0.001)
    with engine._models._lock:  # nobody copies half of them
        llama.load_state_dict(weights)
    updated.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(texts) == 48


def test_weights_that_change_while_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read may be half old: the next call copies again."""
    llama, weights, _, new = old_and_new()
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    import selfspec.engine.model_source as module

    copy = module.from_transformers

    def slow_copy(model: LlamaForCausalLM) -> object:
        copied = copy(model)
        llama.load_state_dict(weights)
        return copied

    with torch.no_grad():
        llama.model.norm.weight.mul_(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "from_transformers", slow_copy)
        engine.generate(PROMPT, max_new_tokens=3)
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens == new


def test_the_runner_with_more_room_is_kept() -> None:
    """A short call nested in a long one ends first: the long one's KV cache is the one that later calls find."""
    engine = SelfSpecGenerator(tiny_llama(dtype=torch.float64, seed=3), policy="ls:2-4")
    short = Acting(2, lambda: engine.generate(PROMPT, max_new_tokens=2))
    long = engine.generate(PROMPT, max_new_tokens=40, streamer=short).stats.peak_cache_bytes
    assert engine.generate(PROMPT, max_new_tokens=2).stats.peak_cache_bytes == long


def test_parameters_made_under_inference_mode() -> None:
    """They have no version counter to look at."""
    with torch.inference_mode():
        llama = tiny_llama(dtype=torch.float64, seed=3)
    expected = reference_greedy(tiny_llama(dtype=torch.float64, seed=3), PROMPT, max_new_tokens=12)
    assert next(llama.parameters()).is_inference()
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    assert engine.generate(PROMPT, max_new_tokens=12).new_tokens == expected
    llama.lm_head.weight = nn.Parameter(tiny_llama(dtype=torch.float64, seed=4).lm_head.weight.detach())
    assert engine.generate(PROMPT, max_new_tokens=12).new_tokens == reference_greedy(llama, PROMPT, max_new_tokens=12)


ANSWERS: dict[str, Any] = {
    "bool": bool,
    "numpy bool": np.bool_,
    "numpy array": lambda stop: np.array([stop]),
    "tensor without dimensions": torch.tensor,
    "tensor of one": lambda stop: torch.tensor([stop]),
    "list": lambda stop: [stop],
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_criterion_may_answer_in_any_of_these(kind: str) -> None:
    class AtTen(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            return ANSWERS[kind](input_ids.shape[1] >= 10)

    engine = SelfSpecGenerator(tiny_llama(dtype=torch.float64, seed=3), policy="ls:2-4")
    result = engine.generate(PROMPT, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([AtTen()]))
    assert result.stats.num_new_tokens == 7
    assert result.stop_reason == "stopping_criteria"


def test_a_streamer_cannot_write_to_the_callers_prompt() -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    expected = reference_greedy(llama, PROMPT, max_new_tokens=12)

    class Writing(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            value.fill_(0)

    prompt = torch.tensor(PROMPT)
    result = SelfSpecGenerator(llama, policy="ls:2-4").generate(prompt, max_new_tokens=12, streamer=Writing())
    assert result.new_tokens == expected
    assert prompt.tolist() == PROMPT
    assert result.sequences[0, :3].tolist() == PROMPT


def test_the_caller_may_write_to_the_prompt_while_the_call_runs() -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    prompt = torch.tensor(PROMPT)
    streamer = Acting(1, lambda: prompt.fill_(0))
    result = SelfSpecGenerator(llama, policy="ls:2-4").generate(prompt, max_new_tokens=12, streamer=streamer)
    assert result.new_tokens == reference_greedy(llama, PROMPT, max_new_tokens=12)


def in_a_child(work: Callable[[], object]) -> bool:
    """Whether a forked process does this without an error, within some seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a process that waits for a lock
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_does_not_wait_for_the_parents_other_threads() -> None:
    """One is in a round with the policy at that moment, and holds a lock."""
    main, inside, goes_on = threading.get_ident(), threading.Event(), threading.Event()

    class Waits(ScriptedExit):
        def plan(self, context: RoundContext) -> Plan:
            if threading.get_ident() != main:
                inside.set()
                goes_on.wait()
            return super().plan(context)

    lock = fork_safe(threading.Lock())
    policy = Policy(Waits([(2, 3)]), name="waits")
    generator = SelfSpecGenerator(from_transformers(tiny_llama(seed=3), layout="plain"))
    call = partial(generator.generate, [5, 1, 7], max_new_tokens=9, policy=policy)
    expected = call().new_tokens

    def decode() -> None:
        with lock:
            call()

    def in_the_child() -> None:
        assert lock.acquire(timeout=0)
        with lend(policy) as loan:
            assert loan.policy is policy
        assert call().new_tokens == expected

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        assert inside.wait(30)
        assert in_a_child(in_the_child)
    finally:
        goes_on.set()
        thread.join()
