"""What `--explain`, `--compare`, `trace` and `inspect` say, on runs small enough to check; and fixed settings, replayed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

from layerskip_models import from_transformers
from policies import (
    LayerCost,
    MeasuredCost,
    ObservationSpec,
    Policy,
    RoundRecord,
    autoregressive,
    cost_of_round,
    parse_policy,
)
from random_adapters import adapted
from records import finished
from selfspec import SelfSpecGenerator
from selfspec.analysis.comparison import compare, first_difference, summarise
from selfspec.analysis.explain import explain, explanation_lines
from selfspec.analysis.inspection import inspect_model, inspection_lines
from selfspec.analysis.replay import (
    AgreementTrace,
    agreement_trace,
    fixed_settings,
    replay,
    trace_agreement,
    watching_all_layers,
)
from selfspec.analysis.trace_plot import plot_trace, trace_lines
from selfspec.engine.results import GenerationResult
from selfspec.messages import Messages, encode_messages
from tiny_llama import tiny_llama, tiny_tokenizer

PROMPT = [5, 3, 7, 1]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": []}
COST = MeasuredCost(num_layers=4, layer_seconds=(1e-6, 1.1e-6), head_seconds=(2e-6, 2.2e-6), draft_seconds=1e-7)


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    model = from_transformers(tiny_llama(seed=4, late_scale=0.9, dtype=torch.float64), layout="plain")
    return SelfSpecGenerator(model, tiny_tokenizer(), policy="ls:2-3")


def watched(generator: SelfSpecGenerator, policy: str) -> GenerationResult:
    resolved = watching_all_layers(generator.resolve_policy(policy), generator.model.num_layers)
    return generator.generate(PROMPT, policy=resolved, trace=True, **OPTIONS)


def test_a_run_explains_itself(generator: SelfSpecGenerator, tmp_path: Path) -> None:
    result = watched(generator, "ls:2-3")
    explanation = explain(result, 4, COST)
    assert sum(explanation.phases.values()) == pytest.approx(1.0, abs=0.05)
    assert explanation.speedups.layers == pytest.approx(result.stats.etpl * 4)
    assert explanation.exact
    assert explanation.speedups.full_acceptance >= explanation.speedups.cost
    # The setting that ran is among the replayed ones, with what it really did.
    own = next(setting for setting in explanation.by_layers if setting.policy == "ls:2-3")
    assert own.tokens_per_cost == pytest.approx(result.stats.etpl)
    rounds = replay(trace_agreement(generator, torch.tensor(PROMPT), 40), 2, 3)
    assert explanation.speedups.cost == pytest.approx(rounds.num_tokens * COST.autoregressive() / rounds.cost(COST))
    text = "\n".join(explanation_lines(explanation, COST))
    assert all(part in text for part in ("replayed from this run", "largest loss is", explanation.settings[0].policy))
    assert "cop" not in text  # a run that copies nothing does not speak of copies
    plot_trace(result.trace or (), 4, result.policy, tmp_path / "trace.svg")
    assert "accepted, copied" not in (tmp_path / "trace.svg").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="no round to draw"):
        plot_trace((), 4, "ar", tmp_path / "trace.png")


def test_an_estimate_says_so_and_one_token_leaves_nothing_to_explain(generator: SelfSpecGenerator) -> None:
    policy, cost = watching_all_layers(generator.resolve_policy("ls:1-2"), 4), LayerCost(4)
    result = generator.generate(PROMPT, policy=policy, trace=True, do_sample=True, seed=1, **OPTIONS)
    assert "estimated from 100% of the positions" in "\n".join(explanation_lines(explain(result, 4, cost), cost))
    result = generator.generate(PROMPT, policy=policy, trace=True, max_new_tokens=1)
    assert "nothing to explain" in "\n".join(explanation_lines(explain(result, 4, cost), cost))


def round_of(exit_layer: int | None, copied: int, drafted: int, accepted: int) -> RoundRecord:
    record = finished(copied + drafted, accepted, cause="cap")
    return replace(record, exit_layer=exit_layer, max_speculations=drafted, num_copied=copied)


def test_rounds_cost_what_their_passes_cost() -> None:
    cost = MeasuredCost(
        num_layers=4, layer_seconds=(1.0, 1.5, 2.0, 2.5, 3.0), head_seconds=(10.0, 20.0, 30.0, 40.0, 50.0)
    )
    assert cost_of_round(round_of(None, 0, 0, 0), cost) == cost.autoregressive() == 14
    drafted = round_of(2, 0, 2, 1)
    assert cost_of_round(drafted, cost) == cost.round(2, 2)
    # A third row went through 2 layers and was looked at; verification needs it anyway.
    stopped = replace(drafted, stop_cause="before_draw")
    assert cost_of_round(stopped, cost) == cost.round(2, 2) + 10
    # Copied tokens go straight to verification: 4 layers and the head over 4 rows.
    copied = round_of(None, 3, 0, 2)
    assert cost_of_round(copied, cost) == 4 * 2.5 + 40
    # With 4 loops of a layer: one sweep of all 4 rows, which all meet the head; and 4 that begin with 1 row, 2.5 on average.
    wave = replace(round_of(1, 0, 0, 0), max_speculations=0, loaded_layers=1, sweeps=1)
    assert cost_of_round(wave, cost) == 2.5 + 40
    assert cost_of_round(replace(wave, loaded_layers=4, sweeps=4), cost) == 4 * 1.75 + 4 * 25


def test_a_run_that_copies_says_what_each_source_gave(generator: SelfSpecGenerator, tmp_path: Path) -> None:
    plain = generator.generate(PROMPT, policy="ar", **OPTIONS)
    store = [plain.sequences[0, :20].tolist()]  # what follows is drafted
    policy = watching_all_layers(generator.resolve_policy("auto:cost=layers"), 4)
    prompt = plain.sequences[0, :12]
    result = generator.generate(prompt, policy=policy, copy_from=store, trace=True, max_new_tokens=30, eos_token_id=[])
    stats = result.stats
    assert stats.num_copied_accepted > 0 and result.trace is not None
    rounds = sum(cost_of_round(record, COST) for record in result.trace)
    explanation = explain(result, 4, COST)
    assert explanation.speedups.cost == pytest.approx((stats.num_new_tokens - 1) * COST.autoregressive() / rounds)
    text = "\n".join(explanation_lines(explanation, COST))
    assert f"copied from earlier text: {stats.num_copied_accepted} of {stats.num_copied} accepted; drafted by" in text
    assert "these settings copy nothing" in text
    lines = trace_lines(result.trace)[1:]
    assert sum(line.count("=") for line in lines) == stats.num_copied_accepted
    assert sum(line.count("+") for line in lines) == stats.num_accepted - stats.num_copied_accepted
    straight = [round_of(None, 3, 0, 2)]
    assert trace_lines(straight)[1].split() == ["0", "copy", "==x"]
    picture = tmp_path / "trace.svg"
    plot_trace(result.trace, 4, result.policy, picture)
    assert "accepted, copied" in picture.read_text(encoding="utf-8")


def test_an_inspection_says_what_to_do(generator: SelfSpecGenerator) -> None:
    seen: list[str] = []
    texts = ["a bed, a fig. " * 4, "ab", "a cab, head. be a bed"]
    inspection = inspect_model(generator, texts, max_new_tokens=12, repeats=2, on_progress=seen.append)
    assert len(seen) == 2 * (2 * 2 + 1) + 1 and seen[-1] == "answers that repeat the prompt"
    assert 0 < inspection.free.shares["drafted by exits"] < 1  # by the policy that the generator has
    gains = {
        0.5: "use plain decoding",
        1.0: "nothing to gain",
        1.5: "nothing gained on free ones",
        2.0: "use the default",
    }
    for repeating, said in gains.items():
        free = replace(inspection.free, speedup=1.2 if repeating == 2 else 1.0)
        told = replace(inspection, free=free, repeating=replace(free, speedup=repeating))
        assert said in told.verdict() == inspection_lines(told)[-1]
    with pytest.raises(ValueError, match="at least 4 tokens"):
        inspect_model(generator, ["ab"])


def test_an_inspection_asks_a_chat_model_and_then_for_the_answer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = tiny_llama(seed=4, max_position_embeddings=256)
    generator = SelfSpecGenerator(from_transformers(llama), tiny_tokenizer(), policy="ls:1-2", prefix_cache=0)
    generator.tokenizer.chat_template = "{% for one in messages %}{{ one.role[0] }} {{ one.content }} {% endfor %}"
    asked: list[Messages] = []

    def encode(messages: Messages, *others: Any) -> list[int]:
        asked.append(messages)
        return encode_messages(messages, *others)

    monkeypatch.setattr("selfspec.analysis.inspection.encode_messages", encode)
    inspect_model(generator, ["a bed, a fig. a head"], max_new_tokens=12, repeats=1)
    answer = generator.generate(asked[0], policy="ar", max_new_tokens=12, do_sample=False).text
    assert [one["content"] for one in asked[1][:2]] == ["a bed, a fig. a head", answer]


@pytest.fixture(scope="module")
def result() -> GenerationResult:
    generator = SelfSpecGenerator(tiny_llama(seed=3))
    return generator.generate([1, 2, 3], max_new_tokens=8, policy="ls:2-2")


def with_rate(result: GenerationResult, tokens_per_second: float) -> GenerationResult:
    return replace(result, stats=replace(result.stats, tokens_per_second=tokens_per_second))


def test_speedup_and_the_rates_beside_it_are_of_the_middle_pair(result: GenerationResult) -> None:
    """Medians of all rates, 80 and 30 tokens/s, would be of no pair."""
    fast = [with_rate(result, rate) for rate in (90.0, 20.0, 80.0)]
    slow = [with_rate(result, rate) for rate in (30.0, 5.0, 40.0)]
    found = summarise([*zip(fast, slow)], greedy=True)
    # 90/30, 20/5, 80/40
    assert (found.speedup, found.speedup_min, found.speedup_max) == (3.0, 2.0, 4.0)
    assert found.outputs_equal is True
    assert found.as_dict()["tokens_per_second"] == 90.0
    assert found.as_dict()["baseline_tokens_per_second"] == 30.0
    assert summarise([*zip(fast[:2], slow[:2])], greedy=True).speedup == 3.0  # the lower one of two


def test_a_difference_in_any_run_is_found(result: GenerationResult) -> None:
    sequences = result.sequences.clone()
    sequences[0, 3 + 5] += 1
    other = replace(result, sequences=sequences)
    assert summarise([(result, result), (other, result)], greedy=True).outputs_equal is False
    assert summarise([(result, result), (other, result)], greedy=True).first_difference == 5
    assert summarise([(result, result), (other, result)], greedy=False).outputs_equal is None


def test_first_difference() -> None:
    for left, right, index in (
        ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2], [1], 1), ([], [], None),
    ):  # fmt: skip
        assert first_difference(left, right) == index


def test_runs_alternate_and_stop_when_interrupted(result: GenerationResult) -> None:
    calls: list[int | None] = []

    def generate(**changes: Any) -> GenerationResult:
        calls.append(changes.get("num_speculations"))
        return result

    numbers: list[int] = []
    assert compare(generate, repeats=2, greedy=True, before_run=numbers.append).repeats == 2
    assert (calls, numbers) == ([None, 0, None, 0], [0, 1, 2, 3])
    assert compare(generate, repeats=3, greedy=True, interrupted=lambda: len(calls) > 6).repeats == 1
    assert compare(generate, repeats=3, greedy=True, interrupted=lambda: True) is None


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


def generator_of(num_layers: int) -> SelfSpecGenerator:
    llama = tiny_llama(num_layers=num_layers, late_scale=0.5, dtype=torch.float64, seed=11)
    model = from_transformers(llama, layout="plain")
    return SelfSpecGenerator(adapted(model, [1, num_layers - 2]), tiny_tokenizer())


@pytest.mark.parametrize("num_layers", [5, 7])
@pytest.mark.parametrize("num_new", [1, 2, 18])
def test_replay_is_what_really_runs(num_layers, num_new):
    generator = generator_of(num_layers)
    prompt = torch.tensor([num_layers, 3, 7, 1])
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


@pytest.mark.parametrize("name", ["fs:2-3", "del", "ar"])
def test_any_greedy_run_that_learns_everywhere_is_a_full_trace(name):
    generator = generator_of(7)
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


def test_a_trace_with_gaps_ranks_the_settings():
    generator, prompts = generator_of(7), [[seed, 3, 7, 1] for seed in range(6)]
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
