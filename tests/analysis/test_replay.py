from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr

from layerskip_models import load_demo
from policies import LayerCost, MeasuredCost, ObservationSpec, Policy, autoregressive, parse_policy
from random_adapters import adapted
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import (
    AgreementTrace,
    Replay,
    agreement_trace,
    fixed_settings,
    replay,
    trace_agreement,
    watching_all_layers,
)
from tiny_llama import pool_model, tiny_tokenizer

T, F = True, False


def test_rounds_by_hand():
    # 9 tokens, the first from prefill; layer 1 of 2 agrees after tokens 0, 1, 3, 4, 5, 6.
    trace = AgreementTrace(tokens=tuple(range(9)), agrees={1: (T, T, F, T, T, T, T, F)}, num_layers=2)
    # G = 3. Committed 1: drafts see T T F -> 2 accepted, 4 committed. Then T T T -> all 3, 8 committed. One is left: no
    # room to draft, a plain step. Layers: 3*1+2, 3*1+2, 2 = 12 for 8 tokens.
    result = replay(trace, 1, 3)
    assert (result.drafted, result.accepted) == ((3, 3, 0), (2, 3, 0))
    assert (result.rounds, result.num_tokens, result.loaded_layers) == (3, 8, 12)
    assert trace.agreement(1) == 6 / 8
    assert AgreementTrace(tokens=(1,), agrees={1: ()}, num_layers=2).agreement(1) is None


def unsteered(index: int) -> SelfSpecGenerator:
    """A model whose exits do not change while a text is decoded, and say the same wherever a round begins."""
    model = pool_model(index, torch.float64)[1].model
    return SelfSpecGenerator(adapted(model, [*model.adapters], seed=index), tiny_tokenizer())


@pytest.mark.parametrize("index", [3, 11])  # 5 and 7 layers
@pytest.mark.parametrize("num_new", [1, 2, 18])
def test_replay_is_what_really_runs(index, num_new):
    generator = unsteered(index)
    prompt = torch.tensor([index, 3, 7, 1])
    trace = trace_agreement(generator, prompt, num_new)
    rejected = 0
    for exit_layer in range(1, generator.model.num_layers):
        for length in (1, 3, 8):
            fixed = {"exit_layer": exit_layer, "num_speculations": length}
            real = generator.generate(prompt, max_new_tokens=num_new, eos_token_id=[], trace=True, **fixed)
            assert tuple(real.new_tokens) == trace.tokens
            expected = replay(trace, exit_layer, length)
            assert real.trace is not None
            rounds = [(r.num_drafted, r.num_accepted) for r in real.trace]
            assert rounds == list(zip(expected.drafted, expected.accepted))
            for name in ("loaded_layers", "etpl", "acceptance_rate", "tokens_per_round"):
                assert getattr(real.stats, name) == getattr(expected, name)
            rejected += real.stats.num_drafted - real.stats.num_accepted
    assert rejected or num_new < 18  # the models were made to disagree at times


def test_cost_of_rounds_by_hand():
    cost = MeasuredCost(num_layers=8, layer_seconds=(1.0, 1.5, 2.0), head_seconds=(4.0, 5.0, 6.0))
    # Two drafts at layer 3: 2 * (3 + 4) to draft, 3 for the last row, 5 layers on 3 rows = 10, the head on them 6: 33.
    # A plain step: 8 layers and the head, 12.
    rounds = Replay(exit_layer=3, num_layers=8, drafted=(2, 0), accepted=(1, 0))
    assert rounds.cost(cost) == 33 + 12


@pytest.mark.parametrize("name", ["fs:2-3", "del", "ar"])
def test_any_greedy_run_that_learns_everywhere_is_a_full_trace(name):
    generator = unsteered(11)
    layers = tuple(range(1, generator.model.num_layers))
    policy = parse_policy(name, num_layers=generator.model.num_layers)
    watched = Policy(policy.exit, policy.stopping, name, also=ObservationSpec(shadow_layers=layers))
    options = {"max_new_tokens": 24, "eos_token_id": []}
    result = generator.generate([5, 3, 7, 1], policy=watched, trace=True, **options)
    trace = agreement_trace(result, generator.model.num_layers)
    assert trace.is_complete
    assert trace.coverage == 1
    assert trace == trace_agreement(generator, torch.tensor([5, 3, 7, 1]), 24)
    assert list(trace.tokens) == generator.generate([5, 3, 7, 1], policy="ar", **options).new_tokens
    assert [len(row) for row in trace.agrees.values()] == [23] * len(layers)
    best = fixed_settings(trace, LayerCost(generator.model.num_layers), range(1, 5))[0]
    real = generator.generate([5, 3, 7, 1], policy=best.policy, **options)
    assert real.stats.etpl == pytest.approx(best.tokens_per_cost)


@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_a_trace_with_gaps_ranks_the_settings(which):
    generator, prompts = unsteered(11), [[seed, 3, 7, 1] for seed in range(6)]
    if which == "demo":
        model, tokenizer = load_demo()
        generator = SelfSpecGenerator(model)
        texts = ("def add(a, b):", "Question: A box holds 12 eggs. How many do", "It was a dark night, and the king")
        prompts = [tokenizer(text)["input_ids"] for text in texts]
    num_layers = generator.model.num_layers
    layers = tuple(range(1, num_layers))
    full, thin = [], []
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [], "trace": True}
    for prompt in prompts:
        policy = watching_all_layers(autoregressive(num_layers), num_layers)
        gaps = replace(policy, also=replace(policy.also, learn_every=3))
        for into, watched in ((full, policy), (thin, gaps)):
            into.append(agreement_trace(generator.generate(prompt, policy=watched, **options), num_layers))
    assert all(trace.coverage < 0.4 and not trace.is_complete for trace in thin)
    with pytest.raises(ValueError, match="does not cover"):
        replay(thin[0], 1, 2)
    cost = LayerCost(num_layers)
    values = []
    for traces in (full, thin):
        total = Counter()
        for trace in traces:
            for setting in fixed_settings(trace, cost, range(1, 9)):
                total[setting.policy] += setting.tokens_per_cost
        values.append([total[f"ls:{layer}-{length}"] for layer in layers for length in range(1, 9)])
    assert spearmanr(*values).statistic >= 0.9
