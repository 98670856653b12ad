"""Costs that were measured in a bad moment are repaired by what rounds take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from policies import LayerCost, MeasuredCost, Plan, RoundContext, RoundRecord, ShadowTokens, parse_policy
from policies.auto.drift import CostDrift

LAYERS = 8
TRUE = MeasuredCost(num_layers=LAYERS, layer_seconds=(1.0, 1.1, 1.2), head_seconds=(2.0, 2.1, 2.2))
# A draft step was timed at 20 instead of 3 seconds, in a moment when the thread kept losing its core.
DEAR = MeasuredCost(
    num_layers=LAYERS, layer_seconds=TRUE.layer_seconds, head_seconds=TRUE.head_seconds, draft_seconds=17.0
)


def record(plan: Plan, *, drafts: int = 3, factor: float = 1.0, index: int = 0, batch_size: int = 1) -> RoundRecord:
    """A text's share of a round whose drafts are all accepted, and that takes `factor` times what TRUE says."""
    exit_layer, true = plan.exit_layer, TRUE.for_batch_size(batch_size)
    if exit_layer is None:
        draft, verify, drafts = 0.0, true.autoregressive(), 0
    else:
        draft = true.drafting(exit_layer, drafts)
        verify = true.round(exit_layer, drafts) - draft
    return RoundRecord(
        index=index,
        num_committed_before=10 + index,
        exit_layer=exit_layer,
        max_speculations=drafts,
        draft_tokens=(1,) * drafts,
        num_accepted=drafts,
        tokens=(1,) * (drafts + 1),
        loaded_layers=LAYERS,
        stop_cause="none" if exit_layer is None else "cap",
        confidences=(0.9,) * drafts,
        draft_seconds=factor * draft,
        verify_seconds=factor * verify,
        batch_size=batch_size,
    )


PLAIN, DRAFT = Plan(exit_layer=None, max_speculations=0), Plan(exit_layer=2, max_speculations=3)


def test_a_round_of_the_scaled_cost_by_hand() -> None:
    """L = 8, E = 2: a step is 2 layers and a look, 2 + 2 = 4; a round of 2 drafts is 6 layers for three
    rows one by one, 2 looks, 6 layers and the head over 3 rows: 6 + 4 + 7.2 + 2.2 = 19.4, of which 8 are draft steps."""
    drift = CostDrift(TRUE)
    assert TRUE.drafting(2, 1) == pytest.approx(4.0)
    assert TRUE.round(2, 2) == pytest.approx(19.4)
    for index in range(20):
        slow = record(DRAFT if index % 2 else PLAIN, index=index)
        changed = drift.observe(RoundRecord(**{**fields(slow), "draft_seconds": 3 * slow.draft_seconds}))
        assert changed == (index == 15)  # eight of each
    assert drift.cost.round(2, 2) == pytest.approx(3 * 8 + 11.4)
    assert drift.cost.look(2) == pytest.approx(3 * 2.0)
    assert drift.cost.autoregressive() == TRUE.autoregressive() and drift.cost.num_layers == LAYERS


def fields(source: RoundRecord) -> dict[str, object]:
    return {name: getattr(source, name) for name in RoundRecord.__dataclass_fields__}


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_a_machine_that_is_slower_all_over_changes_nothing(factor: float) -> None:
    drift = CostDrift(TRUE)
    for index in range(300):
        odd = 50.0 if index % 9 == 4 else 1.0  # the thread lost its core in some rounds
        assert not drift.observe(record(DRAFT if index % 2 else PLAIN, factor=factor * odd, index=index))
    assert drift.cost is TRUE


def test_kinds_that_are_missing_are_asked_for_and_then_not_for_long() -> None:
    drift = CostDrift(TRUE)
    asked = []
    for index in range(1000):
        due = drift.due
        asked.append(due)
        drift.observe(record({"plain": PLAIN, "draft": DRAFT, None: PLAIN}[due], index=index))
    assert asked.count("draft") == 8 and asked.count("plain") == 0
    assert "draft" not in asked[40:]


def test_rounds_without_seconds_teach_nothing() -> None:
    drift = CostDrift(TRUE)
    for index in range(50):
        untimed = record(DRAFT if index % 2 else PLAIN, factor=0.0, index=index)
        assert not drift.observe(untimed)
    assert drift.due is None


def run_auto(measure: Callable[[], MeasuredCost], rounds: int) -> list[int | None]:
    """The exit layers of rounds of `auto` on a text whose drafts are all right."""
    policy = parse_policy("auto", num_layers=LAYERS, measure=measure)
    layers = policy.observes.shadow_layers
    always = torch.ones(len(layers), 12, dtype=torch.long)
    policy.observe_prompt(ShadowTokens(layers=layers, tokens=always, confidences=always * 0.9, target_tokens=always[0]))
    chosen = []
    for index in range(rounds):
        plan = policy.exit.plan(RoundContext(round_index=index, num_committed=10 + index, remaining_tokens=100))
        chosen.append(plan.exit_layer)
        policy.observe(record(plan, index=index))
    return chosen


def test_auto_drafts_again_after_a_calibration_that_made_drafts_dear() -> None:
    truly = run_auto(lambda: TRUE, 200)
    assert sum(layer is not None for layer in truly) > 150
    repaired = run_auto(lambda: DEAR, 200)
    assert repaired[0] is None
    assert all(layer is not None for layer in repaired[100:])


def test_in_company_a_round_is_what_all_its_texts_took() -> None:
    """Three texts, verification at twice its price: compared after eight rounds of each kind, 48 records."""
    drift = CostDrift(TRUE.for_batch_size(3), 3)
    changes = []
    for index in range(16):
        for text in range(3):
            plain = index % 2 == 0
            share = record(PLAIN if plain else DRAFT, index=index, batch_size=3, drafts=1 + text)
            if not plain:  # all get the same share, whatever they drafted
                drafted = [record(DRAFT, batch_size=3, drafts=1 + other) for other in range(3)]
                seconds = {name: sum(getattr(one, name) for one in drafted) / 3 for name in SECONDS}
                share = RoundRecord(**{**fields(share), **seconds, "verify_seconds": 2 * seconds["verify_seconds"]})
            changes.append(drift.observe(share))
    assert changes == [False] * 47 + [True]
    true = TRUE.for_batch_size(3)
    assert drift.cost.round(2, 2) == pytest.approx(2 * true.round(2, 2) - true.drafting(2, 2))


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
    for index in range(16):
        for _ in range(2):
            assert exit_policy.learner.cost == DEAR.for_batch_size(2)
            policy.observe(record(DRAFT if index % 2 else PLAIN, index=index, batch_size=2))
    assert exit_policy.learner.cost != DEAR.for_batch_size(2)


SECONDS = ("draft_seconds", "verify_seconds")


def test_rounds_in_other_company_and_of_both_kinds_say_nothing() -> None:
    drift = CostDrift(TRUE.for_batch_size(2), 2)
    for index in range(200):
        plan = DRAFT if index % 3 else PLAIN
        assert not drift.observe(
            record(plan, factor=1.0 + 4 * (plan is DRAFT), batch_size=1 + 2 * (index % 2), index=index)
        )
        for plan in (PLAIN, DRAFT):
            assert not drift.observe(record(plan, factor=1.0 + 4 * (plan is DRAFT), batch_size=2, index=index))
    assert drift.cost == TRUE.for_batch_size(2)


def company_of_auto(measure: Callable[[], MeasuredCost], rounds: int, texts: int) -> list[set[int | None]]:
    """The exit layers of the rounds of texts that learn together; of their drafts half are right."""
    policy = parse_policy("auto", num_layers=LAYERS, measure=measure)
    layers = policy.observes.shadow_layers
    half = torch.tensor([1, 0]).repeat(len(layers), 12)
    right = ShadowTokens(layers=layers, tokens=half, confidences=half * 0.0 + 0.5, target_tokens=half[0] * 0 + 1)
    policy.observe_prompt(right)
    chosen = []
    for index in range(rounds):
        context = RoundContext(round_index=index, num_committed=10 + index, remaining_tokens=100, batch_size=texts)
        plans = [policy.exit.plan(context) for _ in range(texts)]
        chosen.append({plan.exit_layer for plan in plans})
        for plan in plans:
            policy.observe(record(plan, drafts=1, index=index, batch_size=texts))
    return chosen


def test_auto_ceases_to_draft_in_company_when_the_calibration_made_many_rows_cheap() -> None:
    """As calibrated, a row more costs nothing. Truly each costs as much as the first."""
    rows = range(1, 14)
    cheap = MeasuredCost(num_layers=LAYERS, layer_seconds=(1.0, 1.0), head_seconds=(2.0, 2.0))
    dear = MeasuredCost(
        num_layers=LAYERS, layer_seconds=tuple(map(float, rows)), head_seconds=tuple(2.0 * row for row in rows)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TRUE", dear)
        chosen = company_of_auto(lambda: cheap, 200, 4)
    assert all(len(layers) == 1 for layers in chosen)  # texts in company are probed together
    assert chosen[0] != {None}
    assert chosen[60:] == [{None}] * 140


def test_a_reset_forgets_repairs_too() -> None:
    policy = parse_policy("auto", num_layers=LAYERS, measure=lambda: DEAR)
    fresh = policy.exit.state()  # type: ignore[attr-defined]
    for index in range(40):
        policy.observe(record(DRAFT if index % 2 else PLAIN, index=index))
    assert policy.exit.learner.cost is not DEAR  # type: ignore[attr-defined]
    policy.reset()
    assert policy.exit.learner.cost is DEAR  # type: ignore[attr-defined]
    assert policy.exit.state() == fresh  # type: ignore[attr-defined]


def test_a_cost_that_was_handed_over_is_not_repaired() -> None:
    fixed = MeasuredCost.from_dict({**DEAR.as_dict(), "fixed": True})
    assert run_auto(lambda: fixed, 200) == [None] * 200


def test_counted_layers_are_not_seconds() -> None:
    policy = parse_policy("auto:cost=layers", num_layers=LAYERS)
    for index in range(100):
        policy.observe(record(PLAIN, index=index))
    assert policy.exit.learner.cost == LayerCost(LAYERS)  # type: ignore[attr-defined]
