"""DEL: decayed statistics, exit layer by TPL, dynamic threshold. Golden numbers are worked out in the comments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import DelExit, DelThreshold, Plan, RoundContext, parse_policy
from policies.del_policy import DecayedMatches, DelEstimates
from records import finished, row, shadow

FIRST = RoundContext(round_index=0, num_committed=4, remaining_tokens=50)


def test_decayed_acceptance_by_hand() -> None:
    # omega = .5; rounds of 2 and 4 rows with 1 and 3 matches: (.5 * 1 + 3) / (.5 * 2 + 4) = 3.5 / 5.
    matches = DecayedMatches([1], omega=0.5)
    assert matches.acceptance(1) is None
    matches.observe(shadow([1], [[1, 0]], [[0.9, 0.1]]))
    matches.observe(shadow([1], [[1, 1, 1, 0]], [[0.5, 0.5, 0.5, 0.5]]))
    assert matches.acceptance(1) == pytest.approx(3.5 / 5)


def test_the_papers_alpha_by_hand() -> None:
    # omega = .5. A first round of one row, which matched: u = 0, where the paper divides by 0, so rows count: 1 / 1. Then
    # four rows of which 3 matched: (.5 * 1 + 3) / (.5 * 0 + 3) = 3.5 / 3. The bound before the shadow tokens are looked at is
    # that of 4 matches, 4.5 / 3. A prompt leaves no row out: 1 / 2 of two rows, one of which matched.
    matches = DecayedMatches([1], omega=0.5, alpha="paper")
    matches.observe(shadow([1], [[1]], [[0.9]]))
    assert matches.acceptance(1) == 1.0
    matches.observe(shadow([1], [[1, 1, 1, 0]], [[0.5, 0.5, 0.5, 0.5]]))
    assert matches.most_accepted(1) == pytest.approx(4.5 / 3)
    assert matches.acceptance(1) == matches.most_accepted(1) == pytest.approx(3.5 / 3)
    assert matches.threshold(1) == pytest.approx((((0.5 * 0.9 + 1.5) / 3.5) + 0.5) / 2)
    again = DecayedMatches([1], omega=0.5, alpha="paper")
    again.restore(matches.state())
    assert again.acceptance(1) == matches.acceptance(1)
    of_prompt = DelEstimates([1], alpha="paper")
    of_prompt.observe_prompt(shadow([1], [[1, 0]], [[0.9, 0.2]]))
    assert of_prompt.current.acceptance(1) == 0.5
    rejected = DecayedMatches([1], omega=0.5, alpha="paper")
    rejected.observe(shadow([1], [[1, 1]], [[0.9, 0.9]]))
    for _ in range(1200):  # first drafts that all fail, where this layer is right: S(u) underflows
        rejected.observe(shadow([1], [[1]], [[0.9]]))
        assert rejected.acceptance(1) <= 1000


def test_threshold_by_hand() -> None:
    # Matched rows have confidences .7 and .9 (mean .8), the mismatched one .4: half of .8 + .4 is .6.
    matches = DecayedMatches([1, 2], omega=1.0)
    assert matches.threshold(1) == 0.5  # nothing seen: the documented default
    matches.observe(shadow([1, 2], [[1, 1, 0], [1, 1, 1]], [[0.7, 0.9, 0.4], [0.6, 0.7, 0.8]]))
    assert matches.threshold(1) == pytest.approx(0.6)
    assert matches.threshold(2) == pytest.approx(0.7)  # only matched rows were seen: their mean
    lone = DecayedMatches([1], omega=1.0)
    lone.observe(shadow([1], [[0]], [[0.2]]))
    assert lone.threshold(1) == pytest.approx(0.2)


def test_the_layer_of_the_best_tpl() -> None:
    # Acceptance .5, .8, .9 of ten rows each at L = 4: layer 2 (test_cost works it out), whose d is 2.
    rows = [[1] * 5 + [0] * 5, [1] * 8 + [0] * 2, [1] * 9 + [0]]
    seen = shadow([1, 2, 3], rows, [[0.5] * 10] * 3)
    policy = DelExit(num_layers=4)
    assert policy.plan(FIRST) == Plan(exit_layer=1, max_speculations=1)  # nothing is known yet
    policy.observe_prompt(seen)
    plan = policy.plan(FIRST)
    assert (plan.exit_layer, plan.max_speculations) == (2, 18)
    assert plan.acceptance == pytest.approx({1: 0.5, 2: 0.8, 3: 0.9})
    by_length = DelExit(num_layers=4, length="tpl")
    by_length.observe(finished(0, 0, seen=seen))
    assert by_length.plan(FIRST).max_speculations == 2
    limited = DelExit(num_layers=4, layers=[1, 3])
    limited.observe_prompt(seen)
    assert limited.plan(FIRST).exit_layer == 1
    limited.reset()
    assert limited.plan(FIRST) == Plan(exit_layer=1, max_speculations=1)


def test_no_speculation_is_a_switch() -> None:
    hopeless = shadow([1, 2, 3], [[0, 0]] * 3, [[0.5, 0.5]] * 3)
    for switch, expected in ((True, None), (False, 1)):
        policy = DelExit(num_layers=4, no_speculation=switch)
        policy.observe_prompt(hopeless)
        assert policy.plan(FIRST).exit_layer == expected


def test_drop_and_keep_stop_at_the_same_row() -> None:
    drop, keep = DelThreshold(num_layers=4), DelThreshold(num_layers=4, on_stop="keep")
    for policy in (drop, keep):
        policy.observe_prompt(shadow([1], [[1, 1, 0]], [[0.7, 0.9, 0.4]]))  # tau = .6
    low, high = row(confidence=0.59), row(confidence=0.6)
    assert (drop.stop_before_draw(low), drop.stop_after_draw(low, 3)) == (True, False)
    assert (keep.stop_before_draw(low), keep.stop_after_draw(low, 3)) == (False, True)
    assert not any(policy.stop_before_draw(high) or policy.stop_after_draw(high, 3) for policy in (drop, keep))


def test_tau_stays_when_the_mismatched_rows_are_long_ago() -> None:
    # Matched rows at .8, one mismatched row at .12: (.8 + .12) / 2 = .46, and so it stays while only matched rows come,
    # each at .8: both sums of the mismatched rows fade alike. .5 ** 1100 is 0 in float64.
    matches = DecayedMatches([1], omega=0.5)
    matches.observe(shadow([1], [[1, 0]], [[0.8, 0.12]]))
    for _ in range(1100):
        assert matches.threshold(1) == pytest.approx(0.46)
        matches.observe(shadow([1], [[1]], [[0.8]]))
    assert matches.acceptance(1) == 1.0
    matches.observe(shadow([1], [[0]], [[0.3]]))  # the old row weighs nothing: (.8 + .3) / 2
    assert matches.threshold(1) == pytest.approx(0.55)


def test_the_prompt_decides_the_first_round_only() -> None:
    # Prompt: layer 1 right in both rows (.9, .9), layer 2 in none (.2, .2). Round: layer 1 in none of two, layer 2 in both.
    prompt = shadow([1, 2, 3], [[1, 1], [0, 0], [0, 0]], [[0.9, 0.9], [0.2, 0.2], [0.2, 0.2]])
    first = finished(1, 1, seen=shadow([1, 2, 3], [[0, 0], [1, 1], [0, 0]], [[0.4, 0.4], [0.7, 0.7], [0.2, 0.2]]))
    only_first, counted = DelEstimates([1, 2, 3], omega=0.5), DelEstimates([1, 2, 3], omega=0.5, prompt="counted")
    for estimates in (only_first, counted):
        estimates.begin_text()
        estimates.observe_prompt(prompt)
        assert [estimates.current.acceptance(layer) for layer in (1, 2)] == [1.0, 0.0]
        assert estimates.current.threshold(1) == pytest.approx(0.9)
        estimates.observe(first)
    # Empty lists, then this round: 0 and 1. With the prompt as a round of half the weight: 1 / 3 and 2 / 3.
    assert [only_first.current.acceptance(layer) for layer in (1, 2)] == [0.0, 1.0]
    assert only_first.current.threshold(1) == pytest.approx(0.4)
    assert [counted.current.acceptance(layer) for layer in (1, 2)] == pytest.approx([1 / 3, 2 / 3])
    assert counted.current.threshold(1) == pytest.approx((0.9 + 0.4) / 2)


@pytest.mark.parametrize("name", ["del", "ls:1-9+del"])
def test_a_new_text_starts_afresh_unless_told_otherwise(name: str) -> None:
    seen = shadow([1, 2, 3], [[1, 0]] * 3, [[0.8, 0.4]] * 3)
    for option, expected in (("", 0.5), (":state=kept", 0.6)):
        policy = parse_policy(name + option, num_layers=4)
        assert isinstance(policy.stopping, DelThreshold)
        policy.begin_text()
        policy.observe(finished(1, 1, seen=seen))
        assert policy.stopping.threshold(1) == pytest.approx(0.6)
        saved = policy.state()
        policy.begin_text()
        assert policy.stopping.threshold(1) == pytest.approx(expected)
        assert policy.learns == (option != "")
        policy.reset()
        policy.restore(saved)
        assert policy.stopping.threshold(1) == pytest.approx(expected)


def test_a_policy_that_forgets_takes_up_no_state() -> None:
    kept = parse_policy("del:state=kept", num_layers=4)
    with pytest.raises(ValueError, match="say state=kept"):
        parse_policy("del", num_layers=4).restore(kept.state())
    with pytest.raises(ValueError, match="another version"):
        kept.restore({"exit": {"compared": {"1": 3.0}}, "stopping": {}})


def test_del_shares_its_estimates_and_keeps_them_once() -> None:
    policy = parse_policy("del:state=kept,prompt=counted", num_layers=4)
    assert isinstance(policy.stopping, DelThreshold)
    seen = shadow([1, 2, 3], [[1, 0]] * 3, [[0.8, 0.4]] * 3)
    policy.begin_text()
    policy.observe_prompt(seen)
    policy.observe(finished(1, 1, seen=seen))
    assert policy.exit.state()["matches"] == {layer: pytest.approx([0.95 * 2 + 2, 0.5]) for layer in "123"}
    assert policy.stopping.threshold(2) == pytest.approx(0.6)
    assert policy.stopping.state() == {}
    policy.reset()
    assert policy.stopping.threshold(2) == 0.5


@given(data=st.data(), omega=st.floats(0.05, 1.0), layers=st.integers(1, 5))
def test_estimates_stay_in_the_unit_interval(data: st.DataObject, omega: float, layers: int) -> None:
    matches = DecayedMatches(range(1, layers + 1), omega)
    for _ in range(data.draw(st.integers(1, 6))):
        rows = data.draw(st.integers(1, 5))
        hits = data.draw(
            st.lists(st.lists(st.booleans(), min_size=rows, max_size=rows), min_size=layers, max_size=layers)
        )
        sure = st.floats(0, 1, width=32)
        values = data.draw(st.lists(st.lists(sure, min_size=rows, max_size=rows), min_size=layers, max_size=layers))
        matches.observe(shadow(range(1, layers + 1), hits, values))
    for layer in range(1, layers + 1):
        acceptance = matches.acceptance(layer)
        assert acceptance is not None
        assert 0 <= acceptance <= 1
        assert -1e-6 <= matches.threshold(layer) <= 1 + 1e-6


@pytest.mark.parametrize(
    "options", [{"length": "none"}, {"omega": 0.0}, {"omega": 1.5}, {"max_speculations": 0}, {"layers": [4]}]
)
def test_del_exit_refuses(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        DelExit(num_layers=4, **options)  # type: ignore[arg-type]


def test_state_of_other_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="exit layers"):
        DecayedMatches([1, 2], 0.9).restore(DecayedMatches([1, 3], 0.9).state())
