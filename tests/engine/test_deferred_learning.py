"""DEL asks for few of the shadow tokens it is offered, and decides as if it had asked for all of them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip_models import from_transformers
from policies import DelExit, Drafter, LayerCost, MeasuredCost, RoundContext, ShadowTokens
from records import finished
from selfspec import SelfSpecGenerator
from selfspec.cache.hidden_states import DeferredShadow, HiddenStates
from tiny_llama import tiny_llama

LAYERS = tuple(range(1, 8))
CONTEXT = RoundContext(round_index=0, num_committed=5, remaining_tokens=50)
COSTS = (
    LayerCost(8),
    MeasuredCost(num_layers=8, layer_seconds=(1.0, 1.1, 1.3), head_seconds=(0.5, 0.6, 0.6), draft_seconds=0.2),
)


class Counting(ShadowTokens):
    """Counts how many layers were asked for."""

    __slots__ = ("asked",)

    def rows_of(self, layer: int) -> list[tuple[bool, float]]:
        """See `Shadow`."""
        asked = set(getattr(self, "asked", ())) | {layer}
        object.__setattr__(self, "asked", asked)
        return super().rows_of(layer)


def shadow_of(matches: list[list[bool]], seed: int) -> Counting:
    tokens = torch.tensor(matches).long()
    confidences = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed))
    target = torch.ones(tokens.shape[1], dtype=torch.long)
    return Counting(layers=LAYERS, tokens=tokens, confidences=confidences, target_tokens=target)


@st.composite
def texts(draw: st.DrawFn) -> list[Counting]:
    """A prompt's rows and some rounds; deeper layers are right more often, in some texts hardly so."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    chances = torch.linspace(draw(st.floats(0, 1)), draw(st.floats(0, 1)), len(LAYERS)).unsqueeze(1)
    rounds = []
    for index in range(draw(st.integers(1, 25))):
        rows = 8 if index == 0 else 1 + int(torch.randint(3, (1,), generator=generator))
        rounds.append(shadow_of((torch.rand(len(LAYERS), rows, generator=generator) < chances).tolist(), index))
    return rounds


@settings(max_examples=60, deadline=None)
@given(texts(), st.sampled_from(COSTS), st.booleans())
def test_del_decides_the_same_with_all_shadow_tokens_and_with_those_it_asks_for(
    text: list[Counting], cost: LayerCost | MeasuredCost, no_speculation: bool
) -> None:
    """Layer, cap, acceptance of that layer and threshold, in every round and bit for bit."""
    lazy, eager = (DelExit(num_layers=8, cost=cost, no_speculation=no_speculation, length="tpl") for _ in range(2))
    for policy in (lazy, eager):
        policy.begin_text()
        policy.observe_prompt(text[0])
    for shadow in text[1:]:
        chosen = lazy.plan(CONTEXT)
        for layer in LAYERS:
            eager.estimates.current.acceptance(layer)
        expected = eager.plan(CONTEXT)
        assert (chosen.exit_layer, chosen.max_speculations) == (expected.exit_layer, expected.max_speculations)
        if chosen.exit_layer is not None:
            assert chosen.acceptance is not None
            assert expected.acceptance is not None
            drafter = Drafter(chosen.exit_layer)
            assert chosen.acceptance[drafter] == expected.acceptance[drafter]
            assert lazy.estimates.current.threshold(chosen.exit_layer) == eager.estimates.current.threshold(
                chosen.exit_layer
            )
        for policy in (lazy, eager):
            policy.observe(finished(1, 1, exit_layer=1, seen=shadow))
    for layer in LAYERS:
        assert lazy.estimates.rounds._learn(layer) == eager.estimates.rounds._learn(layer)


def test_layers_that_cannot_be_chosen_are_not_asked_for() -> None:
    """One layer is always right: deeper ones cost more for nothing better, whatever they would have said."""
    text = [shadow_of([[layer >= 2] * 3 for layer in LAYERS], index) for index in range(12)]
    policy = DelExit(num_layers=8)
    policy.observe_prompt(text[0])
    for shadow in text[1:]:
        assert policy.plan(CONTEXT).exit_layer == 2
        policy.observe(finished(1, 1, exit_layer=2, seen=shadow))
    assert all(getattr(shadow, "asked", set()) <= {1, 2} for shadow in text)


def test_hidden_states_are_not_kept_for_ever() -> None:
    """A layer that is never asked for is learned all the same once 256 of its rows wait."""
    policy = DelExit(num_layers=8)
    rows = (60, 60, 60, 60, 17, 60)  # 257 with the fifth
    text = [shadow_of([[layer >= 2] * count for layer in LAYERS], index) for index, count in enumerate(rows)]
    for shadow in text:
        policy.observe(finished(1, 1, exit_layer=2, seen=shadow))
    assert [len(getattr(shadow, "asked", set())) for shadow in text] == [7, 7, 7, 7, 7, 0]


def test_a_record_that_is_kept_holds_no_hidden_states() -> None:
    engine = SelfSpecGenerator(from_transformers(tiny_llama(seed=3)))
    trace = engine.generate([5, 1, 7], max_new_tokens=12, policy="del", trace=True).trace or ()
    shadows = [record.shadow for record in trace if isinstance(record.shadow, DeferredShadow)]
    assert shadows and all(shadow._hidden is None for shadow in shadows)


def test_deferred_shadow_tokens_are_those_of_one_pass() -> None:
    """Layer by layer, several rounds at once and all layers at once: the same tokens, the same confidences."""
    generator = SelfSpecGenerator(tiny_llama(num_layers=4))
    model = generator.model
    states = HiddenStates(model, (1, 3), max_rows=5)
    for layer in (1, 3):
        states.capture(0, layer, torch.randn(5, model.hidden_size, generator=torch.Generator().manual_seed(layer)))
    target = torch.arange(5)
    one, two, three = (states.shadow_tokens(rows, target[:rows]) for rows in (2, 5, 5))
    assert isinstance(one, DeferredShadow)
    one.compute(3, [two])
    assert two.rows_of(3)[:2] == one.rows_of(3)
    assert [match for match, _ in two.rows_of(1)] == (three.tokens[0] == target).tolist()
    assert torch.allclose(two.confidences, three.confidences, atol=1e-6)
    assert torch.equal(two.tokens, three.tokens)
