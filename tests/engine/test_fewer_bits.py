"""Drafts with the model's weights in 8 or 4 bits change no text, leave nothing in the cache, and follow the weights."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from layerskip_models import LayerSkipModel, draft_weights, from_transformers
from layerskip_models.draft_weights import draft_bytes, draft_share, drafter, rounded_linear, why_no_drafter
from layerskip_models.kernels.check import native_works
from policies import Drafter, MeasuredCost
from policies.auto.policy import AutoExit
from selfspec import SelfSpecGenerator
from selfspec.analysis.inspection import inspect_model, inspection_lines
from selfspec.engine import policy_store
from selfspec.engine.draft import Draft, make_drafts
from selfspec.engine.runners.runner import Runner
from tiny_llama import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")
LAYERS = 4
NAMES = ("qkv", "output", "gate_up", "down")
PROMPTS = ([3, 5, 7, 3, 5], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7])
LENGTH = 24


def made(late_scale: float, seed: int = 6) -> LlamaForCausalLM:
    """Wide enough for groups of 4 bits. late_scale: the more, the more often are rounded drafts wrong."""
    return tiny_llama(
        num_layers=LAYERS, vocab_size=50, hidden_size=64, intermediate_size=128, late_scale=late_scale, seed=seed,
        max_position_embeddings=128,
    )  # fmt: skip


@cache
def llama() -> LlamaForCausalLM:
    return made(3.0)


def generator_with(draft_weights: Any = "auto", model: LlamaForCausalLM | None = None) -> SelfSpecGenerator:
    lean = from_transformers(model or llama(), layout="native")
    return SelfSpecGenerator(lean, tiny_tokenizer(), draft_weights=draft_weights, prefix_cache=0)


@pytest.fixture
def generator() -> SelfSpecGenerator:
    return generator_with()


def texts(generator: SelfSpecGenerator, policy: str, **options: Any) -> list[list[int]]:
    return [
        generator.generate(prompt, max_new_tokens=LENGTH, policy=policy, **options).new_tokens for prompt in PROMPTS
    ]


def test_rounded_drafts_are_accepted_and_rejected(generator: SelfSpecGenerator) -> None:
    """Or the tests here would prove nothing. The fewer bits, the more is rejected."""
    rates = []
    for bits in (8, 4):
        stats = [generator.generate(prompt, max_new_tokens=LENGTH, policy=f"bits:{bits}-4").stats for prompt in PROMPTS]
        drafted, accepted = sum(one.num_drafted for one in stats), sum(one.num_accepted for one in stats)
        assert 0 < accepted < drafted
        rates.append(accepted / drafted)
    assert rates[0] > rates[1]


@pytest.mark.parametrize("policy", ["bits:4-3", "bits:8-4,layer=2", "bits:4-6+svip"])
def test_nothing_that_a_draft_wrote_is_read_by_verification(
    generator: SelfSpecGenerator, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys, values and states of drafted rows are NaN when verification begins."""
    expected = texts(generator, "ar")
    poisoned = 0

    def poisoning(runner: Runner, drafts: Sequence[Draft]) -> None:
        nonlocal poisoned
        make_drafts(runner, drafts)
        for draft in drafts:
            if draft.bits is not None:
                poisoned += 1
                text = draft.sequence
                text.cache.values[:, :, text.length - 1 :] = torch.nan
                text.cache.keys[..., text.length - 1 :] = torch.nan
                text.hidden.fill_(torch.nan)

    monkeypatch.setattr("selfspec.engine.round.make_drafts", poisoning)
    assert texts(generator, policy) == expected
    assert poisoned > 3


def test_weights_that_are_nonsense_draft_nonsense(generator: SelfSpecGenerator) -> None:
    """A drafter of another model, and one whose numbers overflow: texts stay, drafts are rejected or not drawn."""
    expected = texts(generator, "ar")
    for scale in (1.0, 1e30):
        other = made(1.5)
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight.mul_(scale)
        wrong = drafter(from_transformers(other, layout="native"), 8)
        wrong.prepare(64)
        generator.model.drafters[8] = wrong
        assert texts(generator, "bits:8-4") == expected
        assert texts(generator, "bits:8-4", logits_processor=[lambda ids, scores: scores * 1.0]) == expected


def test_new_weights_have_new_drafters() -> None:
    """After an update the drafts are the new model's: accepted nearly always, in 8 bits."""
    model = made(1.5, seed=5)
    generator = SelfSpecGenerator(model, prefix_cache=0, draft_weights="int8")
    generator.generate(PROMPTS[0], max_new_tokens=LENGTH, policy="bits:8-4")
    before = generator.model.drafters[8]
    model.load_state_dict(made(1.5, seed=9).state_dict())
    result = generator.generate(PROMPTS[0], max_new_tokens=LENGTH, policy="bits:8-4")
    assert generator.model.drafters[8] is not before
    assert result.new_tokens == generator.generate(PROMPTS[0], max_new_tokens=LENGTH, policy="ar").new_tokens
    assert result.stats.num_accepted > 0.8 * result.stats.num_drafted


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("bits:5-3", "bits must be 8 or 4, got 5"),
        ("bits:8-0", "num_speculations"),
        ("bits:8-3,layer=9", "exit_layer must be in"),
        ("bits:8", "a number of bits and a length"),
        ("bits:8-5+del", "learns from exits in full"),
        ("bits:8-5+pacer", "learns from exits in full"),
    ],
)
def test_what_cannot_be_is_refused(generator: SelfSpecGenerator, policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generator.generate(PROMPTS[0], max_new_tokens=4, policy=policy)


def test_models_that_cannot_draft_in_fewer_bits_say_why() -> None:
    eight = from_transformers(llama(), layout="int8")
    assert "8 bits: there is nothing to gain" in str(why_no_drafter(eight, 8))
    assert why_no_drafter(eight, 4) is None
    with pytest.raises(ValueError, match="float32"):
        drafter(from_transformers(llama().double(), layout="plain"), 8)
    llama.cache_clear()
    for weights, policy in (("none", "bits:8-3"), ("int8", "bits:4-3")):
        with pytest.raises(ValueError, match=f"draft_weights is '{weights}'"):
            generator_with(weights).generate([1], policy=policy)
    with pytest.raises(ValueError, match="one of auto, none, int8, int4"):
        generator_with("int2")


def mixed(in_eight: Sequence[str]) -> LayerSkipModel:
    """Make a model whose matrices have 4 bits, but for the head, the first layer, and these of the others in 8.

    Those after attention have too few inputs for 4.
    """
    model = from_transformers(llama(), layout="int8")
    layers = [
        replace(layer, **{name: rounded_linear(getattr(layer, name), 4) for name in NAMES if name not in in_eight})
        for layer in model.layers[1:]
    ]
    return model.with_layers([model.layers[0], *layers], model.head)


@pytest.mark.parametrize("bits", [8, 4])
def test_their_size_is_known_beforehand(bits: int) -> None:
    for model in (from_transformers(llama(), layout="native"), *([mixed(["gate_up", "down"])] if bits == 4 else [])):
        made = drafter(model, bits)
        pairs = [pair for layer, own in zip(made.layers, model.layers) for pair in zip(layer.linears, own.linears)]
        pairs.append((made.draft_head, model.draft_head))
        size = sum(one.num_bytes for one, own in pairs if one.stored is not own.stored)  # type: ignore[attr-defined]
        assert draft_bytes(model, bits) == pytest.approx(size, rel=0.02)
        share = sum(one.num_bytes for one, _ in pairs) / sum(one.num_bytes for _, one in pairs)
        assert draft_share(model, bits) == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("gain", [1.0, 0.0])
def test_matrices_of_mixed_bits(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has 4 bits is shared, the rest is rounded; the head, too, if that saves enough."""
    monkeypatch.setattr(draft_weights, "_HEAD_GAIN", gain)
    generator = SelfSpecGenerator(mixed(["gate_up", "down"]), tiny_tokenizer(), prefix_cache=0)
    expected = texts(generator, "ar")
    assert texts(generator, "bits:4-3") == texts(generator, "bits:4-4,layer=3") == expected
    model, made = generator.model, generator.model.drafters[4]
    for layer, own in zip(made.layers[1:], model.layers[1:]):
        shared = [one.stored is two.stored for one, two in zip(layer.linears, own.linears)]  # type: ignore[attr-defined]
        assert shared == [True, True, False, False] and layer.down.num_bytes < 0.6 * own.down.num_bytes
    assert (made.draft_head.num_bytes < model.head.num_bytes) == (gain == 0)
    assert "too little to gain" in str(why_no_drafter(mixed([]), 4))


def cost_of(layers: int, share: float) -> MeasuredCost:
    """Seconds per layer; drafts at exits cost so much that none pays."""
    return MeasuredCost(
        num_layers=layers, layer_seconds=(share, 1.02 * share, 1.04 * share), head_seconds=(share, share), fixed=True
    )


@pytest.fixture
def made_up_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = replace(cost_of(LAYERS, 1.0), rounded=((8, cost_of(LAYERS, 0.3)),))
    monkeypatch.setattr(policy_store, "expected_cost", lambda *_: cost)


@pytest.mark.parametrize("late_scale", [3.0, 0.02])
@pytest.mark.usefixtures("made_up_costs")
def test_auto_drafts_with_what_is_there(late_scale: float) -> None:
    """Up to an exit where exits are as good as the model, and cost half as much in fewer bits. Alone and in company."""
    generator = generator_with("int8", made(late_scale))
    exit_policy = generator.policy.exit
    assert isinstance(exit_policy, AutoExit) and exit_policy.observes.bits == (8,)
    expected = texts(generator, "ar")
    drafted: Counter[int | None] = Counter()
    for prompt, text in 2 * [*zip(PROMPTS, expected)]:
        result = generator.generate(prompt, max_new_tokens=LENGTH, trace=True)
        assert result.new_tokens == text
        assert result.trace is not None
        drafted.update({record.exit_layer: record.num_drafted for record in result.trace if record.bits == 8})
    if late_scale > 1:
        assert drafted[LAYERS] and exit_policy.chances.rows[exit_policy.index_of(Drafter(LAYERS, 8))] > 0
    else:
        assert any(layer < LAYERS for layer in drafted)
    together = generator.generate_batch([*PROMPTS], max_new_tokens=LENGTH)
    assert [result.new_tokens for result in together] == expected
    assert len(generator.generate(PROMPTS[0], max_new_tokens=LENGTH, do_sample=True, seed=1).new_tokens) == LENGTH


def test_another_stopping_rule_is_for_exits_in_full() -> None:
    generator = generator_with("int8")
    for name in ("auto+spide", "auto+dv", "auto+svip", "auto:cost=layers+del"):
        assert generator.resolve_policy(name).observes.bits == ()
    with pytest.raises(ValueError, match="bits= changes nothing"):
        generator.resolve_policy("auto:bits=off+spide")


@pytest.mark.usefixtures("made_up_costs")
def test_auto_makes_them_in_the_first_text(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the rest of it pays for that. Later texts know what was learned so far."""
    monkeypatch.setattr(draft_weights, "last_cache", lambda: 0)
    generator = generator_with()
    expected = generator.generate(PROMPTS[2], max_new_tokens=80, policy="ar").new_tokens
    with caplog.at_level(logging.INFO, "selfspec"):
        result = generator.generate(PROMPTS[2], max_new_tokens=80, trace=True)
        assert list(generator.model.drafters) == [8]
        assert result.new_tokens == expected
        assert result.trace is not None and any(record.bits == 8 for record in result.trace)
        assert 0 < result.stats.calibration_seconds < result.stats.seconds
        exit_policy: Any = generator.policy.exit
        assert exit_policy.chances.rows[exit_policy.index_of(Drafter(LAYERS, 8))] > 0
        generator.generate(PROMPTS[2], max_new_tokens=80)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("drafts are made with a copy of the weights in 8 bits from now on: 0 MB, made in 0.")


@pytest.mark.parametrize("lacks", ["room", "size", "wish", "text"])
@pytest.mark.usefixtures("made_up_costs")
def test_auto_leaves_it_where_there_is_no_use_or_no_room(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """A text of few tokens does not pay for it."""
    monkeypatch.setattr(draft_weights, "last_cache", lambda: 1 << 40 if lacks == "size" else 0)
    monkeypatch.setattr(draft_weights, "_is_room_for", lambda size: lacks != "room")
    generator = generator_with("none" if lacks == "wish" else "auto")
    generator.generate(PROMPTS[2], max_new_tokens=8 if lacks == "text" else 80)
    assert not generator.model.drafters


def test_an_inspection_counts_them() -> None:
    model = from_transformers(llama(), layout="native")
    generator = SelfSpecGenerator(model, tiny_tokenizer(), policy="bits:8-4", prefix_cache=0)
    inspection = inspect_model(generator, ["abcdefgh" * 3], max_new_tokens=12, repeats=1)
    assert 0 < inspection.free.shares["drafted in 8 bits"] < 1 and "drafted by exits" not in inspection.free.shares
    assert inspection.copies == {8: draft_bytes(model, 8)}
    assert "a copy of the weights in 8 bits to draft with took 0 MB" in "\n".join(inspection_lines(inspection))
