"""Rows that give no token: they count only if plain decoding comes to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from layerskip_models import from_transformers
from scripted_policies import StopBelow, fixed
from selfspec import NonFiniteLogitsError, SelfSpecGenerator
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [5, 1, 7]
POLICIES = ("ar", "ls:3-20", "ls:1-4", "dv:3,start=0.0", "svip:3,threshold=9", "del", "spide:3,tau=0.01")
PAIRS = [
    pytest.param(policy, how, do_sample, marks=() if do_sample == (i + j) % 2 else pytest.mark.slow)
    for i, policy in enumerate(POLICIES)
    for j, how in enumerate(["masked", "nan", "raises", "infinite"])
    for do_sample in (False, True)
]
"""Any two of a policy, a fault, and greedy or sampled meet in every run; all of them in the slow one."""


class From(LogitsProcessor):
    """Spoils the scores of texts of `length` tokens and longer."""

    def __init__(self, length: int, how: str) -> None:
        self.length, self.how = length, how

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < self.length:
            return scores
        if self.how == "raises":
            raise KeyError("no such state")
        if self.how == "infinite":
            return scores.masked_fill(scores == scores.max(), torch.inf)
        return torch.full_like(scores, torch.nan if self.how == "nan" else -torch.inf)


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((1,), input_ids.shape[1] >= self.length)


class Grammar(LogitsProcessor):
    """Raises for every text whose new tokens are not the beginning of one text."""

    def __init__(self, start: int, text: list[int]) -> None:
        self.start, self.text = start, text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[0, self.start :].tolist()
        if new != self.text[: len(new)]:
            raise ValueError(f"{new} is not in this language")
        return scores


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(dtype=torch.float64, late_scale=0.3, seed=3)


@pytest.fixture(scope="module")
def expected(llama: LlamaForCausalLM) -> list[int]:
    return reference_greedy(llama, PROMPT, max_new_tokens=12)


@pytest.fixture(scope="module")
def engine(llama: LlamaForCausalLM) -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(llama, layout="plain"))


def settings(how: str, do_sample: bool, stop: int | None) -> dict[str, Any]:
    return {
        "max_new_tokens": 20,
        "do_sample": do_sample,
        "seed": 7,
        "logits_processor": LogitsProcessorList([From(9, how)]),
        "stopping_criteria": StoppingCriteriaList([] if stop is None else [StopAt(stop)]),
    }


@pytest.mark.parametrize(("policy", "how", "do_sample"), PAIRS)
def test_what_lies_behind_a_stop_breaks_nothing(
    engine: SelfSpecGenerator, expected: list[int], policy: str, how: str, do_sample: bool
) -> None:
    result = engine.generate(PROMPT, policy=policy, **settings(how, do_sample, stop=9))
    assert (len(result.new_tokens), result.stop_reason) == (6, "stopping_criteria")
    if not do_sample:
        assert result.new_tokens == expected[:6]
    # The next text is right, and an EOS or the budget is a stop like any other.
    assert engine.generate(PROMPT, max_new_tokens=12, policy=policy).new_tokens == expected
    options = {**settings(how, do_sample, stop=None), "max_new_tokens": 6}
    assert len(engine.generate(PROMPT, policy=policy, **options).new_tokens) == 6


@pytest.mark.parametrize(("policy", "how", "do_sample"), PAIRS)
def test_what_the_text_comes_to_is_judged_as_transformers_judges_it(
    engine: SelfSpecGenerator, llama: LlamaForCausalLM, policy: str, how: str, do_sample: bool
) -> None:
    """Greedy: a row masked entirely gives its first token, an infinite logit wins. Nothing can be drawn from either."""
    options = settings(how, do_sample, stop=None)
    if how in ("masked", "infinite") and not do_sample:
        ids = torch.tensor([PROMPT])
        out: Any = llama.generate(
            ids, max_new_tokens=20, do_sample=False, logits_processor=options["logits_processor"],
            attention_mask=torch.ones_like(ids), pad_token_id=0,
        )  # fmt: skip
        assert engine.generate(PROMPT, policy=policy, **options).new_tokens == out[0, 3:].tolist()
        return
    error, message = (KeyError, "no such state") if how == "raises" else (NonFiniteLogitsError, "at position 9")
    with pytest.raises(error, match=message):
        engine.generate(PROMPT, policy=policy, **options)


def test_a_processor_may_refuse_what_was_only_drafted(engine: SelfSpecGenerator, llama: LlamaForCausalLM) -> None:
    expected = reference_greedy(llama, PROMPT, max_new_tokens=25)
    grammar = LogitsProcessorList([Grammar(len(PROMPT), expected)])
    rejected = 0
    for policy in ("ar", "ls:1-4", "ls:2-9", "del", "dv:1,start=0.0"):
        result = engine.generate(PROMPT, max_new_tokens=25, policy=policy, logits_processor=grammar)
        assert result.new_tokens == expected
        rejected += result.stats.num_drafted - result.stats.num_accepted
    assert rejected > 5  # texts that it does refuse were there


def test_a_policy_is_not_shown_nan(llama: LlamaForCausalLM) -> None:
    seen: list[float | None] = []

    class Watch(StopBelow):
        def stop_before_draw(self, row: Any) -> bool:
            seen.append(row.confidence)
            return False

    broken = tiny_llama(dtype=torch.float64, late_scale=1.5, seed=5)
    with torch.no_grad():
        broken.model.embed_tokens.weight[:] = torch.nan
        broken.model.embed_tokens.weight[3] = 1.0
    engine = SelfSpecGenerator(from_transformers(broken, layout="plain"))
    with pytest.raises(NonFiniteLogitsError):
        engine.generate([3], max_new_tokens=25, policy=fixed(1, 4, Watch(0.5)))
    assert all(value == value for value in seen)
