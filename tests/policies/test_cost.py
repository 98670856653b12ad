"""Costs of a round, and the maximiser of tokens per cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import CostModel, LayerCost, MeasuredCost, best_setting, cost_of_round, tokens_per_cost
from records import finished

MEASURED = MeasuredCost(
    num_layers=4, layer_seconds=(1.0, 1.5, 1.75), head_seconds=(2.0, 2.25, 2.5), draft_seconds=0.5, round_seconds=0.25
)


def test_tokens_per_layer_by_hand() -> None:
    cost = LayerCost(8)
    assert tokens_per_cost(0.5, 2, 2, cost) == pytest.approx(7 / 48)  # (1 + 1/2 + 1/4) / (2 * 2 + 8)
    assert tokens_per_cost(1.0, 2, 2, cost) == pytest.approx(3 / 12)  # the limit at a = 1
    assert tokens_per_cost(0.7, 3, 0, cost) == 1 / 8


def test_best_setting_by_hand() -> None:
    # L = 4: layer 2 with a = .8 and d = 2 gives (1 + .8 + .64) / (2 * 2 + 4) = .305; layer 1 at best 1.5 / 5 = .3 (d = 1),
    # layer 3 at best 1.9 / 7 = .2714 (d = 1).
    assert best_setting({1: 0.5, 2: 0.8, 3: 0.9}, 8, LayerCost(4)) == (2, 2, pytest.approx(0.305))
    assert best_setting({1: 0.0, 3: 0.1}, 8, LayerCost(4)) == (1, 0, 0.25)  # nothing pays: no speculation
    assert best_setting({3: 0.1}, 8, LayerCost(4), first=1) == (3, 1, pytest.approx(1.1 / 7))


def test_measured_round_by_hand() -> None:
    assert MEASURED.autoregressive() == 4 * 1.0 + 2.0
    assert MEASURED.look(2) == 2.5
    # d = 0: one row through 2 layers, through the other 2, one head, and the round's own 0.25.
    assert MEASURED.round(2, 0) == 2 + 2 + 2 + 0.25
    # d = 2: three rows one by one through 2 layers, two looks; three rows at once through 2 layers; head of three.
    assert MEASURED.round(2, 2) == 3 * 2 * 1.0 + 2 * 2.5 + 2 * 1.75 + 2.5 + 0.25
    # Beyond the timed rows in a line: 5 rows cost 1.75 + 2 * 0.25 a layer, 2.5 + 2 * 0.25 the head.
    assert MEASURED.round(1, 4) == 5 + 4 * 2.5 + 3 * 2.25 + 3.0 + 0.25


def test_measured_cost_survives_json() -> None:
    assert MeasuredCost.from_dict(MEASURED.as_dict()) == MEASURED


@pytest.mark.parametrize("bad", [(1.0,), (1.0, 0.0), (1.0, -1.0)])
def test_measured_cost_refuses(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="positive timings"):
        MeasuredCost(num_layers=4, layer_seconds=bad, head_seconds=(1.0, 1.0))


@pytest.mark.parametrize("acceptance", [-0.1, 1.1])
def test_acceptance_outside_the_unit_interval(acceptance: float) -> None:
    with pytest.raises(ValueError, match=r"acceptance must be in \[0, 1\]"):
        tokens_per_cost(acceptance, 1, 1, LayerCost(4))


@given(
    num_layers=st.integers(2, 12),
    data=st.data(),
    max_speculations=st.integers(1, 9),
    first=st.integers(0, 1),
    measured=st.booleans(),
)
def test_best_setting_is_brute_force(
    num_layers: int, data: st.DataObject, max_speculations: int, first: int, measured: bool
) -> None:
    rates = data.draw(st.lists(st.floats(0, 1), min_size=num_layers - 1, max_size=num_layers - 1))
    acceptance = dict(enumerate(rates, start=1))
    cost: CostModel = LayerCost(num_layers)
    if measured:
        cost = MeasuredCost(num_layers=num_layers, layer_seconds=(1.0, 1.2), head_seconds=(0.7, 0.9), draft_seconds=0.1)
    exit_layer, length, rate = best_setting(acceptance, max_speculations, cost, first=first)
    every = [
        tokens_per_cost(acceptance[layer], layer, d, cost)
        for layer in acceptance
        for d in range(first, max_speculations + 1)
    ]
    assert rate == pytest.approx(max(every))
    assert rate == pytest.approx(tokens_per_cost(acceptance[exit_layer], exit_layer, length, cost))
    assert first <= length <= max_speculations


def test_company_by_hand() -> None:
    """4 layers; a pass over r rows takes 10 + r per layer and 4 + r for the head, so the line goes on; a draft adds 1."""
    alone = MeasuredCost(
        num_layers=4,
        layer_seconds=tuple(10.0 + rows for rows in range(1, 6)),
        head_seconds=tuple(4.0 + rows for rows in range(1, 6)),
        draft_seconds=1.0,
    )
    pair = alone.for_batch_size(2)
    assert pair.autoregressive() == pytest.approx((4 * 12 + 6) / 2)
    assert pair.look(1) == pytest.approx((6 + 1) / 2)
    # After layer 1, one draft is a step that both texts share, a look, and a pass of the draft's own row; a second one is
    # shared with a quarter of the other text. Then four or six rows go through the other three layers and the head.
    assert pair.round(1, 0) == pytest.approx(pair.autoregressive())
    assert pair.round(1, 1) == pytest.approx(12 + 3.5 + (3 * 14 + 8) / 2)
    assert pair.round(1, 2) == pytest.approx(12 + 3.5 + (11.25 + 5.25 + 1) / 1.25 + (3 * 16 + 10) / 2)
    assert alone.for_batch_size(1) is alone
    assert pair.for_batch_size(4).autoregressive() == pytest.approx((4 * 14 + 8) / 4)
    # Drafts gain less in company: all accepted, two drafts give 3 tokens.
    gains = [3 / cost.round(1, 2) * cost.autoregressive() for cost in map(alone.for_batch_size, (1, 2, 8, 64))]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5
    assert gains[-1] < 1


@pytest.mark.parametrize("texts", [1, 2, 5])
def test_draft_steps_are_part_of_a_round(texts: int) -> None:
    """What a draft more costs is its step, and a row more in the verification, whose rows never become cheaper."""
    for cost in (LayerCost(4), MEASURED.for_batch_size(texts), replace(MEASURED, block=2)):
        assert cost.drafting(3, 0) == 0
        for drafts in range(6):
            more = cost.round(3, drafts + 1) - cost.round(3, drafts)
            step = cost.drafting(3, drafts + 1) - cost.drafting(3, drafts)
            assert step >= 3 * cost.autoregressive() / cost.num_layers / 2
            assert more >= step - 1e-12


def test_rounds_in_fewer_bits_by_hand() -> None:
    """Drafts cost what the rounded model costs; all rows are verified through all layers; a look is a whole step."""
    few = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.0), head_seconds=(2.0, 2.0))
    cost = MeasuredCost(
        num_layers=4, layer_seconds=(3.0, 3.0), head_seconds=(5.0, 5.0), round_seconds=0.5, rounded=((8, few),)
    )
    assert cost.drafting(4, 2, 8) == 2 * (4 * 1 + 2)
    assert cost.rounded_round(4, 2, 8) == 12 + (4 * 3 + 5) + 0.5
    assert cost.rounded_round(4, 2, 4) == 2 * (4 * 3 / 4 + 5) + 17 + 0.5  # not measured: a quarter of 16 bits
    ended = replace(finished(2, 2, exit_layer=4, cause="cap"), bits=8)
    assert cost_of_round(ended, cost) == cost.rounded_round(4, 2, 8)
    assert cost_of_round(replace(ended, stop_cause="before_draw"), cost) == cost.rounded_round(4, 2, 8) + 6
    assert MeasuredCost.from_dict(cost.as_dict()) == cost
