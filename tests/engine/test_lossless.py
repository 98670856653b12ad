"""Greedy output is transformers' own greedy output, token for token, whatever the model, the policy and the stop."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from transformers import GenerationConfig, LlamaForCausalLM

from layerskip_models import LayerSkipModel, from_transformers
from policies import Policy
from scripted_policies import EVERY_POLICY, ScriptedExit, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.choice import RunnerName
from strategies import GreedyCase, greedy_cases
from tiny_llama import full_logits, pool_model, reference_greedy, tiny_llama, tiny_tokenizer

NEAR_TIE = 1e-4
"""In float32, two orders of summation move a logit by up to about this; only then may the outputs part."""
EXAMPLES = 45
MOST_NEAR_TIES = 4


def reference_gap(llama: LlamaForCausalLM, prompt: list[int], options: dict[str, Any], step: int) -> float:
    """Top-2 gap of the reference's own processed logits at one step."""
    ids = torch.tensor([prompt])
    out: Any = llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(do_sample=False, pad_token_id=0, **options),
        tokenizer=tiny_tokenizer(),
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = out.scores[step][0].topk(2).values
    return float(best[0] - best[1])


_REFERENCES: dict[str, list[int]] = {}


def expected_text(case: GreedyCase, llama: LlamaForCausalLM, options: dict[str, Any]) -> list[int]:
    """Asked of transformers once for both runners, whose models are of the same weights."""
    key = repr((case.model, llama.dtype, case.prompt, options))
    if key not in _REFERENCES:
        _REFERENCES[key] = reference_greedy(llama, case.prompt, **options)
    return _REFERENCES[key]


def options_of(case: GreedyCase, llama: LlamaForCausalLM) -> dict[str, Any]:
    """The case's GenerationConfig fields, its stop taken from what the model says without one."""
    options = {**case.options, "max_new_tokens": case.max_new_tokens}
    if case.stop_at is not None:
        kind, position = case.stop_at
        text = expected_text(case, llama, options)
        at = min(position, len(text) - 1)
        options[kind] = (
            [text[at], 23] if kind == "eos_token_id" else [tiny_tokenizer().decode(text[max(0, at - 1) : at + 1])]
        )
    return options


@pytest.mark.parametrize(
    ("dtype", "runner"),
    [
        (torch.float64, "eager"),
        (torch.float32, "eager"),
        (torch.float64, "captured"),
        pytest.param(torch.float32, "captured", marks=pytest.mark.slow),
    ],
    ids=["float64-eager", "float32-eager", "float64-captured", "float32-captured"],
)
@pytest.mark.usefixtures("small_captures")
def test_greedy_output_equals_transformers(dtype: torch.dtype, runner: RunnerName) -> None:
    """Every generated prompt and setting, at every exit layer of its model, against one reference run."""
    count: Counter[str] = Counter()

    @seed(58)  # well mixed, whatever is edited below: see the counts
    @given(case=greedy_cases)
    @settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
    def check(case: GreedyCase) -> None:
        llama, engine = pool_model(case.model, dtype, runner)
        options = options_of(case, llama)
        expected = expected_text(case, llama, options)
        for exit_layer in range(1, case.num_layers):
            config = GenerationConfig(do_sample=False, **options)
            policy = case.policy(exit_layer)
            if case.stopping == "named":  # each in its turn
                name = EVERY_POLICY[count["named"] % len(EVERY_POLICY)]
                policy = named_policy(name, exit_layer, engine.model)
                count.update(["named", name])
            result = engine.generate(case.prompt, generation_config=config, policy=policy, trace=True)
            count["cases"] += 1
            if result.new_tokens != expected:
                step = next(i for i, (a, b) in enumerate(zip(result.new_tokens, expected)) if a != b)
                assert dtype == torch.float32, (exit_layer, result.new_tokens, expected)
                assert reference_gap(llama, case.prompt, options, step) < NEAR_TIE, (
                    exit_layer,
                    result.new_tokens,
                    expected,
                )
                count["near-ties"] += 1
            count["with accepted drafts"] += result.stats.num_accepted > 0
            count["with rejected drafts"] += result.stats.num_accepted < result.stats.num_drafted
            inside = result.trace and len(result.trace[-1].tokens) <= result.trace[-1].num_accepted
            count["stopped inside a draft"] += bool(inside) and result.stop_reason != "length"
            count[result.stop_reason] += 1

    check()
    print(dict(count))
    share = EXAMPLES / 100
    assert count["cases"] >= 300 * share
    assert count["near-ties"] <= MOST_NEAR_TIES
    # Were these rare, the equality above would say little.
    assert count["with accepted drafts"] >= count["cases"] // 4
    assert count["with rejected drafts"] >= count["cases"] // 8
    assert count["stopped inside a draft"] >= 7 * share
    assert min(count["eos"], count["stop_string"]) >= 15 * share
    assert min(count[name] for name in EVERY_POLICY) >= 1.2 * share


@pytest.fixture(scope="module")
def model64(llama64: LlamaForCausalLM) -> LayerSkipModel:
    return from_transformers(llama64, layout="plain")


@pytest.fixture(scope="module")
def expected64(llama64: LlamaForCausalLM) -> list[int]:
    return reference_greedy(llama64, [5, 1, 7], max_new_tokens=14)


@pytest.mark.parametrize(
    ("num_speculations", "runner"),
    [
        *(pytest.param(d, "eager", marks=pytest.mark.slow if d in (5, 7, 8) else ()) for d in range(10)),
        *((d, "captured") for d in (0, 3, 9)),
        pytest.param(1, "captured", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("small_captures")
def test_every_length_at_every_budget(
    num_speculations: int, runner: RunnerName, model64: LayerSkipModel, expected64: list[int]
) -> None:
    """max_new_tokens at every residue of the round: a budget that ends a round early cuts nothing and adds nothing."""
    engine, expected = SelfSpecGenerator(model64, runner=runner), expected64
    for exit_layer in (1, 3):
        for budget in range(1, 15):
            result = engine.generate(
                [5, 1, 7], max_new_tokens=budget, exit_layer=exit_layer, num_speculations=num_speculations
            )
            assert result.new_tokens == expected[:budget]
            assert result.stop_reason == "length"


@pytest.mark.parametrize("runner", ["eager", "captured"])
@pytest.mark.usefixtures("small_captures")
def test_plans_that_change_every_round(runner: RunnerName, llama64: LlamaForCausalLM) -> None:
    """Exit layer and length may differ from round to round, with plain steps between."""
    engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"), runner=runner)
    plans = [(1, 3), (None, 0), (3, 1), (2, 5), (2, 0), (3, 9), (1, 1)]
    for first, prompt in enumerate(([2], [5, 1, 7], [9, 9, 3, 0, 23])):
        expected = reference_greedy(llama64, prompt, max_new_tokens=24)
        for shift in range(first, len(plans), 3):
            policy = Policy(ScriptedExit(plans[shift:] + plans[:shift]))
            result = engine.generate(prompt, max_new_tokens=24, policy=policy)
            assert result.new_tokens == expected


@pytest.mark.parametrize("runner", ["eager", "captured"])
@pytest.mark.usefixtures("small_captures")
def test_the_context_to_its_last_position(runner: RunnerName, llama64: LlamaForCausalLM) -> None:
    engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"), runner=runner)
    room = llama64.config.max_position_embeddings
    for num_prompt in (1, room - 9, room - 1):
        prompt = [i % 24 for i in range(num_prompt)]
        result = engine.generate(prompt, max_new_tokens=room - num_prompt, exit_layer=2, num_speculations=4)
        assert result.new_tokens == reference_greedy(llama64, prompt, max_new_tokens=room - num_prompt)


@pytest.mark.parametrize("runner", ["eager", "captured"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.2), (torch.float16, 0.03)])
def test_half_precision_takes_the_argmax_or_a_near_tie(dtype: torch.dtype, bound: float, runner: RunnerName) -> None:
    """Where even transformers' own modes differ: every token, teacher-forced, is within the rounding of the best.

    bound: of a logit; logits here reach 8, where bfloat16 steps by 1/32 and float16 by 1/256, a few layers deep.
    """
    count: Counter[str] = Counter()
    for number in range(4 if runner == "eager" else 2):
        llama = tiny_llama(num_layers=4, dtype=dtype, seed=number)
        engine = SelfSpecGenerator(from_transformers(llama), runner=runner)
        prompt = [number, 3, 20 - number]
        for policy in ("ar", "ls:1-4", "ls:2-3"):
            new = engine.generate(prompt, max_new_tokens=24, policy=policy).new_tokens
            logits = full_logits(llama, prompt + new)[len(prompt) - 1 : -1]
            gaps = logits.max(dim=-1).values - logits.gather(-1, torch.tensor(new)[:, None])[:, 0]
            assert float(gaps.max()) <= bound
            count["tokens"] += len(new)
            count["near-ties"] += int((gaps > 0).sum())
    print(dict(count))
    assert count["near-ties"] <= count["tokens"] // 20
