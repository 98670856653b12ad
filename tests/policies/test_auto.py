"""`auto`: the value of drafting on against brute force, the rate against enumeration, and what it does at the extremes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Drafter, MeasuredCost, RoundContext, parse_policy
from policies.auto import policy as auto
from policies.auto.best_round import DraftValues
from policies.auto.chances import COPIES, Chances, copy_confidence
from policies.auto.policy import AutoExit
from policies.spide import MIDPOINTS
from records import finished, row, shadow

CONTEXT = RoundContext(round_index=3, num_committed=40, remaining_tokens=50)


def exact_value(frequency: np.ndarray, acceptance: np.ndarray, steps: np.ndarray, look: float, start: float) -> float:
    if len(steps) == 0:
        return 0.0
    worth = -look
    for chance, accepted in zip(frequency, acceptance):
        reached = start * accepted
        worth += chance * max(reached + exact_value(frequency, acceptance, steps[1:], look, reached) - steps[0], 0.0)
    return max(worth, 0.0)


@settings(max_examples=40)
@given(
    chances=st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3),
    acceptance=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    steps=st.lists(st.floats(0.02, 0.8), min_size=1, max_size=4),
    look=st.floats(0.0, 0.1),
)
def test_values_are_those_of_every_course(
    chances: list[float], acceptance: list[float], steps: list[float], look: float
) -> None:
    frequency = np.array(chances) / sum(chances)
    rates = np.array(acceptance)
    values = DraftValues(frequency[None], rates[None], np.array(steps)[None], np.array([look]))
    expected = exact_value(frequency, rates, np.array(steps), look, 1.0)
    # Between the tabulated reliabilities values are interpolated; they are convex, so at most a little too high.
    assert values.start[0] == pytest.approx(expected, abs=0.04)
    assert values.start[0] >= expected - 1e-9


def fed(num_layers: int, hits: dict[int, float], confidence: float = 0.55, rounds: int = 60) -> AutoExit:
    """`auto` after rounds in which each layer agreed in a given share of rows, all of one confidence."""
    policy = AutoExit(num_layers=num_layers, layers=tuple(hits))
    for index in range(rounds):
        matches = [[int((index + 1) * share % 1 < share - 1e-9 or share == 1)] for share in hits.values()]
        policy.observe(finished(0, 0, exit_layer=1, seen=shadow(tuple(hits), matches, [[confidence]] * len(hits))))
    return policy


def test_the_rate_settles_at_the_best_tokens_per_cost() -> None:
    policy = fed(8, {1: 1.0, 4: 1.0}, rounds=400)  # layer 1 of 8 always agrees: 10 drafts, 11 tokens, cost 10 * 1 + 8
    assert policy.plan(CONTEXT).exit_layer == 1
    assert policy.best.rate == pytest.approx(11 / 18, rel=0.05)


def test_nothing_pays() -> None:
    policy = fed(8, {1: 0.0, 2: 0.0, 4: 0.02}, confidence=0.05)
    assert policy.best.rate == 1 / 8
    assert policy.plan(CONTEXT).exit_layer is None


def test_an_exit_of_which_nothing_was_seen_drafts_nothing() -> None:
    policy = AutoExit(num_layers=8, layers=[1, 2])
    for rows in range(auto.SEEN):
        assert policy.plan(CONTEXT).exit_layer is None, rows
        policy.observe_prompt(shadow([1, 2], [[1], [0]], [[0.9]] * 2))
    assert policy.plan(CONTEXT).exit_layer == 1


def test_a_deeper_layer_wins_where_it_is_worth_its_cost() -> None:
    assert fed(8, {1: 0.2, 2: 1.0}).plan(CONTEXT).exit_layer == 2
    assert fed(8, {1: 0.9, 4: 1.0}).plan(CONTEXT).exit_layer == 1


def test_confidence_decides_when_to_stop() -> None:
    policy = AutoExit(num_layers=8, layers=[2])
    for index in range(64):
        sure = index % 2 == 0
        policy.observe(finished(0, 0, exit_layer=2, seen=shadow([2], [[int(sure)]], [[0.95 if sure else 0.15]])))
    stopping = policy.default_stopping()
    stopping.start_round(policy.plan(CONTEXT))
    assert not stopping.stop_before_draw(row(0, exit_layer=2, confidence=0.95))
    assert stopping.stop_before_draw(row(1, exit_layer=2, confidence=0.15))
    assert 0 < stopping.threshold(Drafter(2)) < 1


@pytest.mark.parametrize("longest", [1, 33, 64])
def test_any_allowed_length_has_its_prices(longest: int) -> None:
    policy = AutoExit(num_layers=8, max_speculations=longest)
    policy.plan(RoundContext(round_index=0, num_committed=4, remaining_tokens=100, batch_size=1))
    assert policy.costs.rounds.shape[1] == longest + 1


def test_state_survives_a_file(tmp_path: Path) -> None:
    policy, other, fresh = (parse_policy("auto:cost=layers", num_layers=8) for _ in range(3))
    seen = shadow([1, 2, 3, 4], [[1, 0, 1]] * 4, [[0.8, 0.4, 0.6]] * 4)
    policy.observe_prompt(seen)
    policy.observe(finished(1, 1, exit_layer=2, confidences=[0.7], seen=seen))
    policy.save(tmp_path / "state.json")
    other.load(tmp_path / "state.json")
    assert other.exit.state() == policy.exit.state() != fresh.exit.state()
    old = {name: value for name, value in policy.exit.state().items() if name != "chances"}
    with pytest.raises(ValueError, match="lacks chances: it was saved by another version"):
        other.exit.restore(old)
    short = {**policy.exit.state(), "chances": {"2": {"height": 1.0, "seen": [1.0]}}}
    damaged = {**policy.exit.state(), "chances": {"2": {"height": None}}}
    for wrong in (short, damaged):
        with pytest.raises(ValueError, match="saved by another version"):
            other.exit.restore(wrong)
    assert other.exit.state() == policy.exit.state()
    with pytest.raises(ValueError, match="other exit layers"):
        AutoExit(num_layers=12).restore(policy.exit.state())
    with pytest.raises(ValueError, match="state of policy 'auto:cost=layers'"):
        parse_policy("del", num_layers=8).load(tmp_path / "state.json")
    policy.reset()
    assert policy.exit.state() == fresh.exit.state()


@settings(max_examples=30)
@given(num_layers=st.integers(2, 10), prompts=st.integers(0, 6), rows=st.integers(1, 4), seed=st.integers(0, 999))
def test_it_plans_within_its_limits(num_layers: int, prompts: int, rows: int, seed: int) -> None:
    policy, rng = AutoExit(num_layers=num_layers), np.random.default_rng(seed)
    layers = policy.exit_layers
    for _ in range(prompts):
        hits, sure = rng.random((2, len(layers), rows)).astype(np.float32)
        policy.observe_prompt(shadow(layers, (hits < rng.random()).tolist(), sure.tolist()))
        plan = policy.plan(CONTEXT)
        assert plan.exit_layer is None or 1 <= plan.exit_layer < num_layers
        assert (plan.exit_layer is None) == (plan.max_speculations == 0)
        assert all(0 <= chance <= 1 for chance in policy.acceptance.values())
        # One pass of L layers can never bring more than the draft's tokens, and plain decoding is always possible.
        assert 1 / num_layers <= policy.best.rate < (plan.max_speculations + 13) / num_layers


COST = MeasuredCost(num_layers=8, layer_seconds=(1.0, 1.1), head_seconds=(1.0, 2.0), fixed=True)


def test_learning_takes_its_share_of_the_cost_and_no_more() -> None:
    """Of one exit; where that is known not to pay, a quarter of the time. A look costs 2 of a step's 10 here."""
    policy, looked = AutoExit(num_layers=8, cost=replace(COST, head_seconds=(2.0, 4.0))), []
    assert policy.observes.prompt_rows_for(100, 60) == 6 and policy.observes.prompt_rows_for(100, 9) == 0
    for index in range(20_000):
        layers = policy.observes.shadow_layers
        learn = policy.plan(replace(CONTEXT, match_length=0)).learn
        seen = shadow(layers, [[0]] * len(layers), [[0.3]] * len(layers)) if learn else None
        looked += [index] * learn
        policy.observe(replace(finished(0, 0, cause="none", seen=seen), exit_layer=None))
    price = 2 * len(layers) / 10
    assert layers == (4,)
    share = [price * sum(first <= index < last for index in looked) / (last - first) for first, last in
             ((0, 1_000), (1_000, 20_000))]  # fmt: skip
    assert share[0] <= auto.LEARNING * 1.1 and share[1] == pytest.approx(auto.IDLE_LEARNING, rel=0.1)
    assert policy.observes.prompt_rows_for(100, 30) == 0


def test_another_kind_of_text_is_soon_believed() -> None:
    policy = AutoExit(num_layers=8, layers=[2, 4])
    for texts, right, chosen in ((60, [1, 1], 2), (12, [0, 1], 4)):  # layer 2 was always right, and now only layer 4 is
        for _ in range(texts):
            policy.begin_text()
            policy.observe_prompt(shadow([2, 4], [[one] * 16 for one in right], [[0.6] * 16] * 2))
        assert policy.plan(CONTEXT).exit_layer == chosen


def test_a_saved_state_fits_with_and_without_weights_in_fewer_bits() -> None:
    """What both know is taken up; the rest keeps the prior."""
    bare, rounded = AutoExit(num_layers=8), AutoExit(num_layers=8, bits=(8,))
    for policy in (bare, rounded):
        policy.observe(finished(3, 2, exit_layer=2, confidences=[0.9, 0.8, 0.7]))
    rounded.observe(replace(finished(3, 3, exit_layer=8, confidences=[0.9, 0.9, 0.9]), bits=8))
    saved = json.loads(json.dumps(rounded.state()))
    again, without, fresh = AutoExit(num_layers=8, bits=(8,)), AutoExit(num_layers=8), AutoExit(num_layers=8, bits=(8,))
    again.restore(saved)
    assert again.state() == rounded.state()
    without.restore(saved)
    assert without.state() == bare.state()
    more = AutoExit(num_layers=8, bits=(8,))
    more.restore(json.loads(json.dumps(bare.state())))
    for key, kept in more.state()["chances"].items():
        assert kept == (fresh if key == "-8" else bare).state()["chances"][key]


FULL = MeasuredCost(num_layers=24, layer_seconds=(1.0, 1.05), head_seconds=(1.0, 1.05))
HALF = MeasuredCost(num_layers=24, layer_seconds=(0.5, 0.55), head_seconds=(1.0, 1.05))


@pytest.mark.parametrize(
    ("price", "tokens", "before", "made"),
    [
        (HALF, 100, 0, True),  # the rest of the text pays for it
        (HALF, 50, 0, False),
        (HALF, 50, 500, True),  # and what other texts have put aside
        (FULL, 10_000, 10_000, False),  # they are not cheaper
    ],
)
def test_weights_are_made_where_they_pay_for_it(price: MeasuredCost, tokens: int, before: int, made: bool) -> None:
    policy = AutoExit(num_layers=24, layers=[6, 8], cost=replace(FULL, rounded=((8, price),)), offered_bits=(8,))
    for _ in range(before):
        policy.observe(replace(finished(0, 0, cause="none"), exit_layer=None))
    plan = policy.plan(replace(CONTEXT, remaining_tokens=tokens))
    assert (plan.exit_layer, plan.bits) == ((24, 8) if made else (None, None))
    assert (policy.observes.bits, policy.offered_bits) == (((8,), ()) if made else ((), (8,)))


def test_what_an_exit_drafts_in_fewer_bits_is_experience_with_that_exit() -> None:
    cost = replace(FULL, rounded=((8, HALF),))
    policy = AutoExit(num_layers=24, layers=[6, 8], cost=cost, bits=(8,))
    policy.observe_prompt(shadow([6, 8], [[1] * 16] * 2, [[0.5] * 16] * 2))
    plan = policy.plan(CONTEXT)
    assert (plan.exit_layer, plan.bits) == (6, 8)
    before = policy.chances.rows[:]
    policy.observe(replace(finished(3, 3, exit_layer=6, confidences=[0.5, 0.5, 0.5]), bits=8))
    assert [now - then for now, then in zip(policy.chances.rows, before)] == [3, 0, 0, 0]


def test_weights_that_disappoint_are_not_drafted_with() -> None:
    """The prior promises much; a text that rejects nearly all of it is believed."""
    policy, rounds = AutoExit(num_layers=24, layers=[6, 8], bits=(8,)), 0
    assert policy.plan(CONTEXT).bits == 8
    while policy.plan(CONTEXT).bits is not None:
        rounds += 1
        policy.observe(replace(finished(3, 0, exit_layer=24, confidences=[0.6, 0.6, 0.6]), bits=8))
    assert 1 < rounds < 9


LAYERS = tuple(map(Drafter, (1, 2)))


def test_what_is_usual() -> None:
    """Exits are right less often than they are sure, drafts in 8 bits nearly always, and copies by their match."""
    chances = Chances((Drafter(2), Drafter(24, 8), COPIES))
    frequency, usual = chances.tables()
    assert np.all(np.diff(usual) >= 0) and frequency.sum(axis=1) == pytest.approx([1, 1, 1])
    assert np.all(usual[0] < MIDPOINTS) and usual[1, 5] > 0.98
    assert [chances.of(2, copy_confidence(length)) for length in (2, 4, 16)] == pytest.approx(
        [0.55, 0.75, 0.94], abs=0.01
    )


def test_a_few_rows_move_a_whole_drafter_and_no_other() -> None:
    chances = Chances(LAYERS)
    before = chances.tables()[1]
    for _ in range(6):
        chances.learn(0, 0.55, 1.0)
    moved = chances.tables()[1] - before
    assert moved[0, 5] > 0.4 and np.all(moved[0, 2:8] > 0.2) and np.all(moved[1] == 0)


@pytest.mark.parametrize(("height", "slope"), [(1.0, 1.0), (0.5, 0.2), (-1.5, 1.3)])
def test_a_line_and_bins_find_the_truth(height: float, slope: float) -> None:
    """Of 400 rows: also where a confidence says little, as when tokens are sampled."""
    chances, rng = Chances(LAYERS), np.random.default_rng(3)
    odds = np.log(np.array(MIDPOINTS) / (1 - np.array(MIDPOINTS)))
    truth = 1 / (1 + np.exp(-height - slope * odds))
    for index in rng.integers(0, 10, size=400):
        chances.learn(0, MIDPOINTS[index], float(rng.random() < truth[index]))
    assert np.abs(chances.tables()[1][0, :10] - truth[:10]).mean() < 0.1
