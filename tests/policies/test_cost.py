"""Costs of a round, the maximiser of tokens per cost, and costs that are corrected by what rounds take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import (
    CostModel,
    Drafter,
    LayerCost,
    MeasuredCost,
    Plan,
    RoundContext,
    RoundRecord,
    cost_of_round,
    parse_policy,
    tokens_per_cost,
)
from policies.auto.round_costs import RoundCosts
from policies.cost import best_setting
from records import finished, shadow

MEASURED = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.5, 1.75), head_seconds=(2.0, 2.25, 2.5), draft_seconds=0.5)


def test_tokens_per_layer_by_hand() -> None:
    cost = LayerCost(8)
    assert tokens_per_cost(0.5, 2, 2, cost) == pytest.approx(7 / 48)  # (1 + 1/2 + 1/4) / (2 * 2 + 8)
    assert tokens_per_cost(1.0, 2, 2, cost) == pytest.approx(3 / 12)  # the limit at a = 1
    assert tokens_per_cost(0.7, 3, 0, cost) == 1 / 8
    # L = 4: layer 2 with a = .8 and d = 2 gives (1 + .8 + .64) / (2 * 2 + 4) = .305; layer 1 at best 1.5 / 5 = .3 (d = 1),
    # layer 3 at best 1.9 / 7 = .2714 (d = 1).
    assert best_setting({1: 0.5, 2: 0.8, 3: 0.9}, 8, LayerCost(4)) == (2, 2, pytest.approx(0.305))
    assert best_setting({1: 0.0, 3: 0.1}, 8, LayerCost(4)) == (1, 0, 0.25)  # nothing pays: no speculation
    assert best_setting({3: 0.1}, 8, LayerCost(4), first=1) == (3, 1, pytest.approx(1.1 / 7))


def test_measured_round_by_hand() -> None:
    assert MEASURED.autoregressive() == 4 * 1.0 + 2.0
    assert MEASURED.head_cost(2) == 2.5
    # d = 0: one row through 2 layers, through the other 2, one head.
    assert MEASURED.round(2, 0) == 2 + 2 + 2
    # d = 2: three rows one by one through 2 layers, two looks; three rows at once through 2 layers; head of three.
    assert MEASURED.round(2, 2) == 3 * 2 * 1.0 + 2 * 2.5 + 2 * 1.75 + 2.5
    # Beyond the timed rows in a line: 5 rows cost 1.75 + 2 * 0.25 a layer, 2.5 + 2 * 0.25 the head.
    assert MEASURED.round(1, 4) == 5 + 4 * 2.5 + 3 * 2.25 + 3.0


@pytest.mark.parametrize("bad", [(1.0,), (1.0, 0.0), (1.0, -1.0)])
def test_measured_cost_refuses(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="positive timings"):
        MeasuredCost(num_layers=4, layer_seconds=bad, head_seconds=(1.0, 1.0))


@given(
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=11),
    longest=st.integers(1, 9),
    first=st.integers(0, 1),
    measured=st.booleans(),
)
def test_best_setting_is_brute_force(rates: list[float], longest: int, first: int, measured: bool) -> None:
    acceptance, num_layers = dict(enumerate(rates, start=1)), len(rates) + 1
    cost: CostModel = LayerCost(num_layers)
    if measured:
        cost = MeasuredCost(num_layers=num_layers, layer_seconds=(1.0, 1.2), head_seconds=(0.7, 0.9), draft_seconds=0.1)
    exit_layer, length, rate = best_setting(acceptance, longest, cost, first=first)
    every = [tokens_per_cost(acceptance[e], e, d, cost) for e in acceptance for d in range(first, longest + 1)]
    assert rate == pytest.approx(max(every))
    assert rate == pytest.approx(tokens_per_cost(acceptance[exit_layer], exit_layer, length, cost))
    assert first <= length <= longest


def test_company_by_hand() -> None:
    """4 layers; a pass over r rows takes 10 + r per layer and 4 + r for the head, so the line goes on; a draft adds 1."""
    layer, head = (tuple(first + rows for rows in range(1, 6)) for first in (10.0, 4.0))
    alone = MeasuredCost(num_layers=4, layer_seconds=layer, head_seconds=head, draft_seconds=1.0)
    pair = alone.for_batch_size(2)
    assert pair.autoregressive() == pytest.approx((4 * 12 + 6) / 2)
    assert pair.head_cost(1) == pytest.approx((6 + 1) / 2)
    # After layer 1, one draft is a step that both texts share, a look, and a pass of the draft's own row; a second one is
    # shared with a quarter of the other text. Then four or six rows go through the other three layers and the head.
    assert pair.round(1, 0) == pytest.approx(pair.autoregressive())
    assert pair.round(1, 1) == pytest.approx(12 + 3.5 + (3 * 14 + 8) / 2)
    assert pair.round(1, 2) == pytest.approx(12 + 3.5 + (11.25 + 5.25 + 1) / 1.25 + (3 * 16 + 10) / 2)
    assert alone.for_batch_size(1) is alone
    assert pair.for_batch_size(4).autoregressive() == pytest.approx((4 * 14 + 8) / 4)
    # Drafts gain less in company: all accepted, two drafts give 3 tokens.
    gains = [3 / cost.round(1, 2) * cost.autoregressive() for cost in map(alone.for_batch_size, (1, 2, 8, 64))]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.5 and gains[-1] < 1


def test_rounds_in_fewer_bits_by_hand() -> None:
    """Drafts cost what the rounded model costs; all rows are verified through all layers; a look is a whole step."""
    few = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.0), head_seconds=(2.0, 2.0))
    cost = MeasuredCost(num_layers=4, layer_seconds=(3.0, 3.0), head_seconds=(5.0, 5.0), rounded=((8, few),))
    assert cost.drafting(4, 2, 8) == 2 * (4 * 1 + 2)
    assert cost.round(4, 2, 8) == 12 + (4 * 3 + 5)
    assert cost.round(4, 2, 4) == 2 * (4 * 3 / 4 + 5) + 17  # not measured: a quarter of 16 bits
    ended = replace(finished(2, 2, exit_layer=4, cause="cap"), bits=8)
    assert cost_of_round(ended, cost) == cost.round(4, 2, 8)
    assert cost_of_round(replace(ended, stop_cause="before_draw"), cost) == cost.round(4, 2, 8) + 6
    assert MeasuredCost.from_dict(cost.as_dict()) == cost


LAYERS = 8
TRUE = MeasuredCost(num_layers=LAYERS, layer_seconds=(1.0, 1.1, 1.2), head_seconds=(2.0, 2.1, 2.2))
# A draft step was timed at 20 instead of 3 seconds, in a moment when the thread kept losing its core.
DEAR = replace(TRUE, draft_seconds=17.0)


def record(plan: Plan, *, drafts: int = 3, factor: float = 1.0, index: int = 0, batch_size: int = 1) -> RoundRecord:
    """A text's share of a round whose drafts are all accepted, and that takes `factor` times what TRUE says."""
    exit_layer, true = plan.exit_layer, TRUE.for_batch_size(batch_size)
    if exit_layer is None:
        draft, verify, drafts = 0.0, true.autoregressive(), 0
    else:
        draft = true.drafting(exit_layer, drafts)
        verify = true.round(exit_layer, drafts) - draft
    found = finished(drafts, drafts, cause="none" if exit_layer is None else "cap", confidences=(0.9,) * drafts)
    seconds = {"draft_seconds": factor * draft, "verify_seconds": factor * verify}
    return replace(found, index=index, exit_layer=exit_layer, batch_size=batch_size, **seconds)


PLAIN, DRAFT = Plan(exit_layer=None, max_speculations=0), Plan(exit_layer=2, max_speculations=3)


DRAFTERS = (Drafter(2),)


def costs_of(cost: MeasuredCost, texts: int = 1) -> RoundCosts:
    return RoundCosts(cost, DRAFTERS, (), 4, texts, repair=True)


def test_a_round_of_the_corrected_cost_by_hand() -> None:
    """L = 8, E = 2: a step is 2 layers and a look, 2 + 2 = 4; a round of 2 drafts is 6 layers for three
    rows one by one, 2 looks, 6 layers and the head over 3 rows: 6 + 4 + 7.2 + 2.2 = 19.4, of which 8 are draft steps."""
    costs, changes = costs_of(TRUE), []
    assert TRUE.drafting(2, 1) == pytest.approx(4.0)
    assert costs.rounds[0, 2] == costs.of(0, 2) == pytest.approx(19.4)
    for index in range(8):
        slow = record(DRAFT if index % 2 else PLAIN, index=index)
        changes.append(costs.observe(replace(slow, draft_seconds=3 * slow.draft_seconds)))
    assert changes == [False] * 7 + [True]  # three of each are enough; looked at after 2, 4, 8 rounds
    assert costs.rounds[0, 2] == pytest.approx(3 * 8 + 11.4)
    assert costs.looks[0] == pytest.approx(3 * 2.0) and costs.steps[0, 0] == pytest.approx(3 * 2.0 + (0.1 * 6 + 0.1))
    assert costs.plain == costs.of(None, 0) == TRUE.autoregressive()


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_a_machine_that_is_slower_all_over_changes_nothing(factor: float) -> None:
    costs = costs_of(TRUE)
    for index in range(300):
        odd = 50.0 if index % 9 == 4 else 1.0  # the thread lost its core in some rounds
        assert not costs.observe(record(DRAFT if index % 2 else PLAIN, factor=factor * odd, index=index))


def test_a_verification_is_corrected_by_its_rows() -> None:
    """Of 4 rows twice as dear as expected, of 16 four times; between them in a line, and further on as of 16.

    A copy is planned, too."""
    costs, expected = costs_of(TRUE), [TRUE.copying(copied) for copied in range(33)]
    for _ in range(6):
        for copied, factor in ((0, 1), (3, 2), (15, 4)):
            copying = replace(finished(copied, 0), exit_layer=None, num_copied=copied)
            costs.observe(replace(copying, draft_seconds=0.5, verify_seconds=factor * expected[copied] - 0.5))
    found = [now / then for now, then in zip(costs.copying, expected)]
    assert [found[rows - 1] for rows in (1, 4, 10, 16, 33)] == pytest.approx([1, 2, 3, 4, 4])
    assert costs.rounds[0, 3] == pytest.approx(TRUE.drafting(2, 3) + 2 * (TRUE.round(2, 3) - TRUE.drafting(2, 3)))


def test_what_rounds_have_shown_is_told_once_and_makes_the_same_costs() -> None:
    rounded = replace(TRUE, layer_seconds=(0.5, 0.6), head_seconds=(1.0, 1.0))
    costs = RoundCosts(replace(TRUE, rounded=((8, rounded),)), (*DRAFTERS, Drafter(8, 8)), (8,), 4, 1, repair=True)
    assert costs.learned() is None
    for index in range(12):
        one = record(DRAFT if index % 2 else PLAIN, drafts=1, factor=7.0, index=index)
        costs.observe(replace(one, draft_seconds=2 * one.draft_seconds))
    learned = costs.learned()
    assert learned is not None and costs.learned() is None
    assert learned.autoregressive() == pytest.approx(7 * TRUE.autoregressive())
    again = RoundCosts(learned, (*DRAFTERS, Drafter(8, 8)), (8,), 4, 1, repair=True)
    assert again.rounds[0, :2] == pytest.approx(7 * costs.rounds[0, :2])
    assert dict(learned.rounded)[8].autoregressive() == pytest.approx(7 * rounded.autoregressive())
    assert costs_of(TRUE, 2).learned() is None
    for told in (True, False):  # once more when as many plain steps are known as are remembered, and then no more
        for index in range(20):
            costs.observe(record(PLAIN, factor=7.0, index=index))
        assert (costs.learned() is not None) == told


def test_kinds_that_are_missing_are_tried_and_then_seldom() -> None:
    costs, plain, drafts = costs_of(TRUE), [], []
    for index in range(1000):
        plain += [index] * costs.is_due()
        if not costs.is_due() and costs.is_due(0):
            drafts.append(index)
        costs.observe(record(DRAFT if drafts[-1:] == [index] else PLAIN, index=index))
    assert plain == [0] and drafts[:4] == [1, 6, 11, 140] and len(drafts) == 10


def run_auto(measure: Callable[[], MeasuredCost], rounds: int) -> list[int | None]:
    """The exit layers of rounds of `auto` on a text whose drafts are all right."""
    policy = parse_policy("auto", num_layers=LAYERS, measure=measure)
    layers = policy.observes.shadow_layers
    policy.observe_prompt(shadow(layers, [[1] * 12] * len(layers), [[0.9] * 12] * len(layers)))
    chosen = []
    for index in range(rounds):
        plan = policy.exit.plan(RoundContext(round_index=index, num_committed=10 + index, remaining_tokens=100))
        chosen.append(plan.exit_layer)
        policy.observe(record(plan, index=index))
    return chosen


def test_auto_drafts_again_after_an_expectation_that_made_drafts_dear() -> None:
    truly = run_auto(lambda: TRUE, 200)
    assert sum(layer is not None for layer in truly) > 150
    repaired = run_auto(lambda: DEAR, 300)
    assert repaired[1] is None  # the first round was a try
    assert sum(layer is not None for layer in repaired[200:]) > 90


def test_in_company_a_round_is_what_all_its_texts_took() -> None:
    """Three texts, verification at twice its price: compared after three rounds of each kind, the 8th round."""
    costs, changes = costs_of(TRUE, 3), []
    drafted = [record(DRAFT, batch_size=3, drafts=drafts) for drafts in (1, 2, 3)]
    draft, verify = (sum(getattr(one, name) for one in drafted) / 3 for name in ("draft_seconds", "verify_seconds"))
    for index in range(8):
        for share in drafted:
            if index % 2:  # all get the same share, whatever they drafted
                share = replace(share, index=index, draft_seconds=draft, verify_seconds=2 * verify)
            else:
                share = record(PLAIN, index=index, batch_size=3)
            changes.append(costs.observe(share))
    assert changes == [False] * 23 + [True]
    true = TRUE.for_batch_size(3)
    assert costs.rounds[0, 2] == pytest.approx(2 * true.round(2, 2) - true.drafting(2, 2))


def test_a_text_that_fails_does_not_shift_the_rounds_that_follow() -> None:
    """Its round has one record of two. Then it leaves, another one comes, and rounds are told apart as before."""
    policy = parse_policy("auto", num_layers=LAYERS, measure=lambda: DEAR)
    exit_policy: Any = policy.exit

    def batch_size(texts: int) -> None:
        exit_policy.plan(RoundContext(round_index=0, num_committed=9, remaining_tokens=99, batch_size=texts))

    batch_size(2)
    policy.observe(record(PLAIN, batch_size=2))
    batch_size(1)
    batch_size(2)
    expected = exit_policy.costs.rounds.tolist()
    for index in range(8):
        for _ in range(2):
            assert exit_policy.costs.rounds.tolist() == expected
            policy.observe(record(DRAFT if index % 2 else PLAIN, index=index, batch_size=2))
    assert exit_policy.costs.rounds.tolist() != expected


def test_a_reset_forgets_corrections_too() -> None:
    policy = parse_policy("auto", num_layers=LAYERS, measure=lambda: DEAR)
    chooser: Any = policy.exit
    fresh, expected = chooser.state(), chooser.costs.rounds.tolist()
    for index in range(40):
        policy.observe(record(DRAFT if index % 2 else PLAIN, index=index))
    assert chooser.costs.rounds.tolist() != expected
    policy.reset()
    assert chooser.costs.rounds.tolist() == expected and chooser.state() == fresh


def test_a_cost_that_was_handed_over_is_not_corrected() -> None:
    fixed = MeasuredCost.from_dict({**DEAR.as_dict(), "fixed": True})
    assert run_auto(lambda: fixed, 200) == [None] * 200
