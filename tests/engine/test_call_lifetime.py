"""A call keeps the weights that it began with, and the next one runs on new ones. `test_as_built` has what is refused."""

from __future__ import annotations

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

from batched_runs import in_threads
from callbacks import Acting, Recorder
from launched_processes import results_of
from layerskip_models import from_transformers
from layerskip_models.fork_safe import fork_safe
from policies import Plan, Policy, RoundContext
from scripted_policies import ScriptedExit
from selfspec import SelfSpecGenerator
from selfspec.engine import model_source
from selfspec.engine.policy_store import lend
from tiny_llama import reference_greedy, tiny_llama
from weight_updates import UPDATES

PROMPT = [5, 1, 7]
LENGTH = 20


@cache
def text_of(seed: int) -> list[int]:
    return reference_greedy(tiny_llama(dtype=torch.float64, seed=seed), PROMPT, max_new_tokens=LENGTH)


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_llama(dtype=torch.float64, seed=3)


@pytest.fixture
def engine(llama: LlamaForCausalLM) -> SelfSpecGenerator:
    return SelfSpecGenerator(llama, policy="ls:2-4")


def update(llama: LlamaForCausalLM) -> None:
    """To weights with which it says something else."""
    llama.load_state_dict(tiny_llama(dtype=torch.float64, seed=4).state_dict())
    assert text_of(3) != text_of(4)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "with a call between"])
def test_weights_updated_while_a_call_runs(
    llama: LlamaForCausalLM, engine: SelfSpecGenerator, at: int, nested: bool
) -> None:
    """The call ends with the weights it began with; later calls run prefill and rounds on the new ones alone."""
    between: list[list[int]] = []

    def act() -> None:
        update(llama)
        if nested:
            between.append(engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens)

    result = engine.generate(PROMPT, max_new_tokens=LENGTH, streamer=Acting(at, act))
    assert result.new_tokens == text_of(3)
    assert between == [text_of(4)] * nested
    for _ in range(2):
        assert engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens == text_of(4)


def test_threads_share_a_generator_while_its_weights_change(llama: LlamaForCausalLM, engine: SelfSpecGenerator) -> None:
    """Every text is of the old weights or of the new ones, never of both; once all know, of the new ones."""
    texts: list[list[int]] = []
    updated = threading.Event()

    def work() -> None:
        for _ in range(12):
            known = updated.is_set()
            text = engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens
            assert text == text_of(4) or (not known and text == text_of(3))
            texts.append(text)

    def act() -> None:
        while len(texts) < 6:
            time.sleep(0.001)
        with engine._models._lock:  # nobody copies half of them
            update(llama)
        updated.set()

    in_threads([work] * 4, act)
    assert len(texts) == 48


def test_weights_that_change_while_they_are_copied(
    llama: LlamaForCausalLM, engine: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read may be half old: the next call copies again."""
    copy = model_source.from_transformers

    def slow_copy(model: LlamaForCausalLM) -> object:
        copied = copy(model)
        update(llama)
        return copied

    with torch.no_grad():
        llama.model.norm.weight.mul_(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(model_source, "from_transformers", slow_copy)
        engine.generate(PROMPT, max_new_tokens=3)
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens == text_of(4)


def test_parameters_made_under_inference_mode() -> None:
    """They have no version counter to look at."""
    with torch.inference_mode():
        llama = tiny_llama(dtype=torch.float64, seed=3)
    assert next(llama.parameters()).is_inference()
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).new_tokens == text_of(3)
    llama.lm_head.weight = nn.Parameter(tiny_llama(dtype=torch.float64, seed=4).lm_head.weight.detach())
    assert engine.generate(PROMPT, max_new_tokens=12).new_tokens == reference_greedy(llama, PROMPT, max_new_tokens=12)


@pytest.mark.parametrize("answer", [bool, np.bool_, lambda stop: np.array([stop]), torch.tensor, lambda stop: [stop]])
def test_a_criterion_may_answer_in_any_of_these(answer: Callable[[bool], Any], engine: SelfSpecGenerator) -> None:
    """Or by a tensor of one, as most do."""

    class AtTen(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            return answer(input_ids.shape[1] >= 10)

    result = engine.generate(PROMPT, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([AtTen()]))
    assert (result.stats.num_new_tokens, result.stop_reason) == (7, "stopping_criteria")


def test_the_prompt_is_the_call_s_own(engine: SelfSpecGenerator) -> None:
    """A streamer cannot write to the caller's; the caller may write to it while the call runs."""

    class Writing(Recorder):
        def put(self, value: Tensor) -> None:
            value.fill_(0)

    prompt = torch.tensor(PROMPT)
    result = engine.generate(prompt, max_new_tokens=LENGTH, streamer=Writing())
    assert result.new_tokens == text_of(3)
    assert prompt.tolist() == result.sequences[0, :3].tolist() == PROMPT
    writing = Acting(1, lambda: prompt.fill_(0))
    assert engine.generate(prompt, max_new_tokens=LENGTH, streamer=writing).new_tokens == text_of(3)


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

    def in_the_child() -> list[int]:
        assert lock.acquire(timeout=0)
        with lend(policy) as loan:
            assert loan.policy is policy
        return call().new_tokens

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        assert inside.wait(30)
        assert results_of(1, in_the_child) == [expected]
    finally:
        goes_on.set()
        thread.join()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", UPDATES)
def test_the_next_call_runs_on_updated_weights(name: str, tied: bool) -> None:
    torch.manual_seed(0)
    llama = tiny_llama(dtype=torch.float64, seed=3, tie_word_embeddings=tied)
    engine = SelfSpecGenerator(llama, policy="ls:2-4")
    first = engine.generate(PROMPT, max_new_tokens=12).new_tokens
    UPDATES[name](llama)
    changed = reference_greedy(llama, PROMPT, max_new_tokens=12)
    assert changed != first
    assert engine.generate(PROMPT, max_new_tokens=12).new_tokens == changed


def test_unchanged_weights_are_copied_by_refresh_alone(llama: LlamaForCausalLM, engine: SelfSpecGenerator) -> None:
    model = engine.model
    for _ in range(5):
        engine.generate(PROMPT, max_new_tokens=20)
        llama(torch.tensor([PROMPT]))
    assert engine.model is model
    llama.model.embed_tokens.weight.data[PROMPT[-1]] *= -2
    engine.refresh()
    assert engine.model is not model
    expected = reference_greedy(llama, PROMPT, max_new_tokens=20)
    assert engine.generate(PROMPT, max_new_tokens=20).new_tokens == expected


def test_a_large_sample_is_spread_over_rows_and_columns() -> None:
    """Else an update of some rows, as an adapter's may be, would not be noticed."""
    sample = model_source._sampled(torch.arange(2048 * 1024))
    assert len({int(n) // 1024 for n in sample}) == len({int(n) % 1024 for n in sample}) == len(sample) == 32
    assert int(sample[-1]) // 1024 > 1900


def test_a_model_that_changes_its_dtype() -> None:
    """Policies with measured costs, or networks of their own, are made anew."""
    llama = tiny_llama(dtype=torch.float32, seed=3)
    engine = SelfSpecGenerator(llama, policy="auto:cost=layers")
    engine.generate(PROMPT, max_new_tokens=8)
    before = engine.policy
    llama.double()
    expected = reference_greedy(llama, PROMPT, max_new_tokens=20)
    assert engine.generate(PROMPT, max_new_tokens=20).new_tokens == expected
    assert engine.model.dtype == torch.float64
    assert engine.policy is not before
