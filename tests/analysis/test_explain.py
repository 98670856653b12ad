"""What `--explain`, `trace` and `inspect` say, on runs small enough to check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip_models import from_transformers
from policies import LayerCost, MeasuredCost, RoundRecord, cost_of_round
from records import finished
from selfspec import SelfSpecGenerator
from selfspec.analysis.explain import explain, explanation_lines
from selfspec.analysis.inspection import inspect_model, inspection_lines
from selfspec.analysis.replay import replay, trace_agreement, watching_all_layers
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


def test_watching_does_not_change_the_output(generator: SelfSpecGenerator) -> None:
    plain = generator.generate(PROMPT, num_speculations=0, **OPTIONS)
    for policy in ("auto:cost=layers", "del", "spide:1"):
        assert watched(generator, policy).new_tokens == plain.new_tokens


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
