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
from policies.auto.acceptance_model import AcceptanceModel
from policies.auto.constants import TUNING
from policies.auto.draft_values import DraftValues
from policies.auto.policy import AutoExit, AutoStopping
from policies.spide import MIDPOINTS, NUM_BINS
from records import finished, row, shadow

CONTEXT = RoundContext(round_index=3, num_committed=40, remaining_tokens=50)


def exact_value(frequency: np.ndarray, acceptance: np.ndarray, steps: np.ndarray, look: float, start: float) -> float:
    """What drafting on is worth, by going through every sequence of confidences."""
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
    assert values.start()[0] == pytest.approx(expected, abs=0.03)
    assert values.start()[0] >= expected - 1e-9


def fed(num_layers: int, hits: dict[int, float], confidence: float = 0.55, rounds: int = 60) -> AutoExit:
    """`auto` after rounds in which each layer agreed in a given share of rows, all of one confidence."""
    policy = AutoExit(num_layers=num_layers, layers=tuple(hits))
    for index in range(rounds):
        matches = [[int((index + 1) * share % 1 < share - 1e-9 or share == 1)] for share in hits.values()]
        policy.observe(finished(0, 0, exit_layer=1, seen=shadow(tuple(hits), matches, [[confidence]] * len(hits))))
    return policy


def test_the_rate_settles_at_the_best_tokens_per_cost() -> None:
    # Layer 1 of 8 always agrees: 10 drafts, 11 tokens, cost 10 * 1 + 8.
    policy = fed(8, {1: 1.0, 4: 1.0}, rounds=400)
    assert policy.plan(CONTEXT).exit_layer == 1
    assert policy.learner.rate == pytest.approx(11 / 18, rel=0.05)


def test_nothing_pays() -> None:
    policy = fed(8, {1: 0.0, 2: 0.0, 4: 0.02}, confidence=0.05)
    assert policy.learner.rate == pytest.approx(1 / 8, rel=0.01)
    # Looking at a first row costs no layer, and a rare confidence might pay; this one never does.
    stopping = AutoStopping(policy.learner)
    for layer in (1, 2, 4):
        stopping.start_round(policy.plan(CONTEXT))
        assert stopping.stop_before_draw(row(0, exit_layer=layer, confidence=0.05))


def test_a_deeper_layer_wins_where_it_is_worth_its_cost() -> None:
    assert fed(8, {1: 0.2, 2: 1.0}).plan(CONTEXT).exit_layer == 2
    assert fed(8, {1: 0.9, 4: 1.0}).plan(CONTEXT).exit_layer == 1


def test_confidence_decides_when_to_stop() -> None:
    policy = AutoExit(num_layers=8, layers=[2])
    for index in range(64):
        sure = index % 2 == 0
        policy.observe(finished(0, 0, exit_layer=2, seen=shadow([2], [[int(sure)]], [[0.95 if sure else 0.15]])))
    stopping = AutoStopping(policy.learner)
    stopping.start_round(policy.plan(CONTEXT))
    assert not stopping.stop_before_draw(row(0, exit_layer=2, confidence=0.95))
    assert stopping.stop_before_draw(row(1, exit_layer=2, confidence=0.15))
    assert 0 < stopping.threshold(Drafter(2)) < 1


def test_state_survives_a_file(tmp_path: Path) -> None:
    policy, other, fresh = (parse_policy("auto:cost=layers", num_layers=8) for _ in range(3))
    seen = shadow([1, 2, 3, 4], [[1, 0, 1]] * 4, [[0.8, 0.4, 0.6]] * 4)
    policy.observe_prompt(seen)
    policy.observe(finished(1, 1, exit_layer=2, confidences=[0.7], seen=seen))
    policy.save(tmp_path / "state.json")
    other.load(tmp_path / "state.json")
    assert other.exit.state() == policy.exit.state() != fresh.exit.state()
    old = {name: value for name, value in policy.exit.state().items() if name != "fit"}
    with pytest.raises(ValueError, match="lacks fit: it was saved by another version"):
        other.exit.restore(old)
    with pytest.raises(ValueError, match="state of policy 'auto:cost=layers'"):
        parse_policy("del", num_layers=8).load(tmp_path / "state.json")
    policy.reset()
    assert policy.exit.state() == fresh.exit.state()


@settings(max_examples=30)
@given(num_layers=st.integers(2, 10), prompts=st.integers(0, 6), rows=st.integers(1, 4), seed=st.integers(0, 999))
def test_it_plans_within_its_limits(num_layers: int, prompts: int, rows: int, seed: int) -> None:
    policy, rng = AutoExit(num_layers=num_layers), np.random.default_rng(seed)
    layers, learner = policy.exit_layers, policy.learner
    for _ in range(prompts):
        hits, sure = rng.random((2, len(layers), rows)).astype(np.float32)
        policy.observe_prompt(shadow(layers, (hits < rng.random()).tolist(), sure.tolist()))
        plan = policy.plan(CONTEXT)
        assert plan.exit_layer is None or 1 <= plan.exit_layer < num_layers
        assert (plan.exit_layer is None) == (plan.max_speculations == 0)
        assert np.all((learner.acceptance >= 0) & (learner.acceptance <= 1))
        assert learner.acceptance.shape == (len(layers), NUM_BINS)
        # One pass of L layers can never bring more than the draft's tokens, and plain decoding is always possible.
        assert 1 / num_layers * 0.9 < learner.rate < (plan.max_speculations + 13) / num_layers


def taught(policy: AutoExit, rows: int) -> AutoExit:
    """After a prompt of so many rows, in which every layer was right half the time."""
    layers = policy.exit_layers
    policy.begin_text()
    policy.observe_prompt(shadow(layers, [[1, 0] * (rows // 2)] * len(layers), [[0.5] * rows] * len(layers)))
    return policy


def test_earlier_calls_save_learning_and_are_outweighed() -> None:
    policy, other = AutoExit(num_layers=8), AutoExit(num_layers=8)
    fresh = policy.observes.prompt_rows
    assert taught(policy, TUNING.enough_observations // 2).observes.prompt_rows == fresh
    assert taught(policy, TUNING.enough_observations // 2).observes.prompt_rows == TUNING.prompt_rows_taught < fresh
    for _ in range(3):
        taught(policy, TUNING.memory)
        assert policy.learner.known <= 2 * TUNING.memory  # as much as TUNING.memory from before, and this prompt
    other.restore(policy.state())
    assert other.observes == policy.observes and other.plan(CONTEXT) == policy.plan(CONTEXT)
    policy.reset()
    assert policy.observes.prompt_rows == fresh


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
    assert saved["places"] == [1, 2, 3, 4, -8]
    again = AutoExit(num_layers=8, bits=(8,))
    again.restore(saved)
    assert {**again.state(), "rate": None} == {**rounded.state(), "rate": None}  # the rate is solved again
    without = AutoExit(num_layers=8)
    without.restore(saved)
    seen = rounded.learner.table.seen.items()
    assert without.learner.table.seen == {drafter: rows for drafter, rows in seen if drafter.bits is None}
    more = AutoExit(num_layers=8, bits=(8,))
    more.restore(json.loads(json.dumps(bare.state())))
    assert more.learner.table.seen[Drafter(2)] == bare.learner.table.seen[Drafter(2)]
    assert sum(more.learner.table.seen[Drafter(8, 8)]) == 0
    with pytest.raises(ValueError, match="other exit layers"):
        AutoExit(num_layers=12).restore(saved)


FULL = MeasuredCost(num_layers=24, layer_seconds=(1.0, 1.05), head_seconds=(1.0, 1.05))
HALF = MeasuredCost(num_layers=24, layer_seconds=(0.5, 0.55), head_seconds=(1.0, 1.05))


@pytest.mark.parametrize(
    ("right", "rows", "price", "planned"),
    [
        (0.0, 8, HALF, (24, 8)),  # no exit is right: all layers
        (0.0, 6, HALF, None),  # too few rows to know
        (1.0, 8, HALF, (6, 8)),  # exits are right, and cheaper in fewer bits
        (1.0, 8, FULL, None),  # they are not cheaper
        (0.0, 8, FULL, None),
    ],
)
def test_weights_are_wanted_where_they_promise_more(
    right: float, rows: int, price: MeasuredCost, planned: tuple[int, int] | None
) -> None:
    """From a prompt's rows on, and not before. Without that all is decided as if there were no such offer."""
    layers, cost = [6, 8], replace(FULL, rounded=((8, price),))
    offered = AutoExit(num_layers=24, layers=layers, cost=cost, offered_bits=(8,))
    bare = AutoExit(num_layers=24, layers=layers, cost=cost)
    for policy in (offered, bare):
        policy.observe_prompt(shadow(layers, [[right] * rows] * 2, [[0.5] * rows] * 2))
    plan = offered.plan(CONTEXT)
    assert offered.observes.bits == ()
    if planned is not None:
        assert (plan.exit_layer, plan.bits) == planned
        return
    assert plan == replace(bare.plan(CONTEXT), acceptance=plan.acceptance)
    assert offered.learner.rate == pytest.approx(bare.learner.rate, rel=0.05)


def test_what_an_exit_drafts_in_fewer_bits_is_experience_with_that_exit() -> None:
    cost = replace(FULL, rounded=((8, HALF),))
    policy = AutoExit(num_layers=24, layers=[6, 8], cost=cost, bits=(8,))
    policy.observe_prompt(shadow([6, 8], [[1] * 8] * 2, [[0.5] * 8] * 2))
    plan = policy.plan(CONTEXT)
    assert (plan.exit_layer, plan.bits) == (6, 8)
    stopping = policy.default_stopping()
    stopping.start_round(plan)
    assert stopping.threshold(Drafter(6, 8)) == policy.learner.needed(Drafter(6))

    def seen() -> list[float]:
        return [sum(policy.learner.table.seen[drafter]) for drafter in (Drafter(6), Drafter(24, 8))]

    exit_rows, rows_of_all = seen()
    policy.observe(replace(finished(3, 3, exit_layer=6, confidences=[0.5, 0.5, 0.5]), bits=8))
    assert seen() == [exit_rows + 3, rows_of_all]


def with_bits() -> AutoExit:
    """After a prompt in which no exit was right: it drafts by all layers in 8 bits."""
    policy = AutoExit(num_layers=24, layers=[6, 8], bits=(8,))
    policy.observe_prompt(shadow([6, 8], [[0] * 8] * 2, [[0.5] * 8] * 2))
    assert policy.plan(CONTEXT).bits == 8
    return policy


def test_weights_that_disappoint_are_not_drafted_with() -> None:
    """The prior promises much; a text that rejects nearly all of it is believed."""
    policy, rounds = with_bits(), 0
    while policy.plan(CONTEXT).bits is not None:
        rounds += 1
        policy.observe(replace(finished(3, 0, exit_layer=24, confidences=[0.6, 0.6, 0.6]), bits=8))
    assert 1 < rounds < 9


def test_first_drafts_in_fewer_bits_are_short() -> None:
    """Until a few were seen, since all that is known of them is what is usual."""
    policy, lengths = with_bits(), []
    for _ in range(4):
        lengths.append(policy.plan(CONTEXT).max_speculations)
        policy.observe(replace(finished(4, 4, exit_layer=24, confidences=[0.9] * 4), bits=8))
    assert lengths == [TUNING.usual_length] * 2 + [TUNING.max_speculations] * 2


@pytest.mark.parametrize(("accepted", "believed"), [(1, True), (3, False)])
def test_drafts_that_surprise_are_learned_from_at_once(accepted: int, believed: bool) -> None:
    """Rounds in which as many are accepted as supposed wait until there are many more of them."""
    policy = fed(24, {1: 1.0, 8: 1.0}, confidence=0.75)  # nearly always right
    before = policy.learner.mean_acceptance[Drafter(1)]
    for _ in range(4):
        policy.observe(finished(3, accepted, exit_layer=1, confidences=[0.75] * 3))
    assert (policy.learner.mean_acceptance[Drafter(1)] < before) == believed


LAYERS = tuple(map(Drafter, (1, 2, 3, 4, 6, 8)))
LOW_BITS = (Drafter(2), Drafter(4), Drafter(16, 8))


def counts(acceptance: np.ndarray, rows: float) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, seen) of as many rows in every bin."""
    seen = np.full(acceptance.shape, rows)
    return acceptance * seen, seen


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


NOTHING = counts(np.zeros((len(LAYERS), NUM_BINS)), 0.0)


def test_unseen_layers_are_right_more_often_than_sure_and_alike() -> None:
    estimate = AcceptanceModel(LAYERS, 16).acceptance(*NOTHING)
    assert np.all(estimate == estimate[0]) and np.all(np.diff(estimate[0]) >= 0)
    assert np.all(estimate[0, :10] > MIDPOINTS[:10])


def test_a_few_rows_move_a_whole_layer_and_less_its_neighbours() -> None:
    model = AcceptanceModel(LAYERS, 16)
    before = model.acceptance(*NOTHING)
    accepted, seen = (array.copy() for array in NOTHING)
    seen[3, 5] = 6.0  # all rejected
    model.fit(accepted, seen)
    moved = before - model.acceptance(*NOTHING)
    assert np.all(moved[:, 5] > 0.03)  # what one layer shows says something of all
    assert moved[3, 5] == moved[:, 5].max() and moved[3, 2] > moved[0, 2]
    assert model.acceptance(accepted, seen)[3, 5] < before[3, 5] - 0.3


def test_drafts_in_fewer_bits_have_a_line_of_their_own() -> None:
    """Exits that are right one time in ten whatever their confidence say nothing about those of the whole model."""
    odds = np.log(MIDPOINTS) - np.log(1 - np.clip(MIDPOINTS, 0.03, 0.9999))
    truth = sigmoid(np.array([-2.2, -2.2, 3.5])[:, None] + np.array([0.0, 0.0, 1.2])[:, None] * odds)
    nothing = {size: counts(np.zeros((size, NUM_BINS)), 0.0) for size in (1, 2, 3)}
    model = AcceptanceModel(LOW_BITS, 16)
    for _ in range(12):
        model.fit(*counts(truth, 500.0))
    assert model.acceptance(*nothing[3]) == pytest.approx(truth, abs=0.03)
    other = AcceptanceModel(LOW_BITS[:2], 16)
    other.restore(model.state(), LOW_BITS)
    assert other.acceptance(*nothing[2]) == pytest.approx(truth[:2], abs=0.03)
    again = AcceptanceModel(LOW_BITS, 16)
    again.restore(other.state(), LOW_BITS[:2])
    prior = AcceptanceModel(LOW_BITS[2:], 16).acceptance(*nothing[1])[0]
    assert again.acceptance(*nothing[3])[2] == pytest.approx(prior)


@settings(max_examples=60)
@given(seed=st.integers(0, 999), rows=st.sampled_from([1.0, 30.0, 2000.0]))
def test_fits_settle_where_nothing_is_more_probable(seed: int, rows: float) -> None:
    """Also from counts that no line explains: an unguarded Newton step jumps back and forth there."""
    rng = np.random.default_rng(seed)
    seen = rows * rng.integers(0, 2, (len(LAYERS), NUM_BINS))
    accepted = seen * rng.choice([0.0, 0.1, 0.9, 1.0], seen.shape)
    model = AcceptanceModel(LAYERS, 16)
    for _ in range(40):
        model.fit(accepted, seen)
    first = np.array(model.state()["parameters"])
    model.fit(accepted, seen)
    assert np.array(model.state()["parameters"]) == pytest.approx(first, abs=1e-6)
    estimate = model.acceptance(accepted, seen)
    assert np.all((estimate > 0) & (estimate < 1))
