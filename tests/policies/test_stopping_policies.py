"""Stopping policies on rounds written by hand: finite state, Draft&Verify, entropy rules, SPIDE, DEL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import DelExit, Drafter, Plan, RoundContext, parse_policy
from policies.del_policy import DecayedMatches, DelThreshold
from policies.fixed import FiniteStateLength
from policies.spide import BINS, EDGES, MIDPOINTS, NUM_BINS, AcceptanceTable, SpideStopping, bin_of
from policies.thresholds import AdaEdlThreshold, DraftVerifyThreshold, SvipThreshold
from records import finished, row, shadow

EXITS = EXIT_1, EXIT_2, EXIT_3 = Drafter(1), Drafter(2), Drafter(3)
PLAN = Plan(exit_layer=1, max_speculations=20)


def test_finite_state_follows_its_script() -> None:
    policy = FiniteStateLength(2)
    lengths = [policy.length]
    # all accepted, all accepted, one short, none, none, none; at 0 a plain step, which is all that it drafted, accepted
    for drafted, accepted in [(2, 2), (3, 3), (4, 3), (3, 0), (2, 0), (1, 0), (0, 0), (1, 1)]:
        assert policy.stop_before_draw(row(0)) == (lengths[-1] == 0)
        policy.observe(finished(drafted, accepted))
        lengths.append(policy.length)
    assert lengths == [2, 3, 4, 3, 2, 1, 0, 1, 2]
    assert not policy.stop_after_draw(row(0), 5)
    assert policy.stop_after_draw(row(1), 5)
    for forget in (policy.begin_text, policy.reset):
        for _ in range(90):
            policy.observe(finished(4, 4))
        assert policy.length == 92
        forget()
        assert policy.length == 2
    with pytest.raises(ValueError, match=r"\[1, 64\], got 65"):
        FiniteStateLength(65)


def test_draft_verify_follows_its_script() -> None:
    policy = DraftVerifyThreshold(0.5)
    assert policy.stop_after_draw(row(0, confidence=0.49), 7)
    assert not policy.stop_after_draw(row(0, confidence=0.5), 7)
    assert policy.stop_after_draw(replace(row(0, confidence=0.5), probability=0.49), 7)  # sampled: the drawn token's
    assert policy.stop_after_draw(row(17, confidence=0.9), 7)  # the eighteenth token is the last
    assert not policy.stop_before_draw(row(0, confidence=0.0))
    # Of 2 drafts none: 0 < .8, towards .51 by a tenth: .9 * .5 + .1 * .51 = .501. Of 6 in all 4: (0 + 2/3) / 2 < .8: .502.
    policy.observe(finished(2, 0))
    assert policy.threshold(EXIT_1) == pytest.approx(0.501)
    policy.observe(finished(4, 4))
    assert policy.threshold(EXIT_1) == pytest.approx(0.502)
    # Of 16 in all 14: (1/3 + 7/8) / 2 = .604: .503. Of 26 in all 24: (.604 + .923) / 2 = .764: .504. Of 36 in all 34:
    # (.764 + .944) / 2 = .854: down again.
    for expected in (0.503, 0.504, 0.503):
        policy.observe(finished(10, 10))
        assert policy.threshold(EXIT_1) == pytest.approx(expected)
    # At its cap (its own 18, or the plan's) a lower threshold would change nothing.
    policy.observe(finished(18, 18))
    policy.observe(finished(3, 3, cause="cap"))
    policy.observe(finished(0, 0))
    assert policy.threshold(EXIT_1) == pytest.approx(0.503)
    # The next text has the threshold, and no drafts yet: all of 2 are above .8.
    policy.begin_text()
    policy.observe(finished(2, 2))
    assert policy.threshold(EXIT_1) == pytest.approx(0.502)
    policy.reset()
    assert policy.threshold(EXIT_1) == 0.5
    assert DraftVerifyThreshold().threshold(EXIT_1) == 0.6


def test_entropy_rules_by_hand() -> None:
    svip = SvipThreshold(0.6)
    assert not svip.stop_after_draw(row(0, entropy=0.36), 1)  # sqrt(.36) is the bound, not above it
    assert svip.stop_after_draw(row(0, entropy=0.37), 1)
    assert svip.stop_after_draw(row(17, entropy=0.0), 1)
    adaedl = AdaEdlThreshold(0.4)
    # 1 - sqrt(.2 H) < .4 when H > .36 / .2 = 1.8.
    assert not adaedl.stop_after_draw(row(0, entropy=1.79), 1)
    assert adaedl.stop_after_draw(row(0, entropy=1.81), 1)
    adaedl.observe(finished(2, 0))
    assert adaedl.threshold(EXIT_1) == pytest.approx(0.401)
    for policy in (svip, adaedl):
        assert not policy.stop_before_draw(row(0, entropy=9.0))
        policy.reset()
    assert adaedl.threshold(EXIT_1) == 0.4


def test_the_papers_twenty_bins() -> None:
    edges, midpoints = BINS["paper"]
    found = [bin_of(value, edges) for value in (0.0, 0.1, 0.89, 0.9, 0.905, 0.91, 0.985, 0.99, 0.9999, 1.0)]
    assert found == [0, 1, 8, 9, 9, 10, 17, 18, 18, 19]
    assert len(midpoints) == 20 and midpoints[9] == pytest.approx(0.905) and midpoints[19] == 1.0


def test_our_twenty_bins_and_their_edges() -> None:
    # From .1 on, 1 - confidence falls to .07, .05, .03, .02, .01, .005, .002, .001, .0003, .0001 and below.
    low = (0.0, 0.1, 0.25, 0.3, 0.45, 0.5, 0.65, 0.7)
    assert [bin_of(value) for value in low] == [0, 1, 2, 3, 4, 5, 6, 7]
    high = (0.85, 0.92, 0.94, 0.96, 0.975, 0.985, 0.993, 0.997, 0.9985, 0.9995, 0.9998, 0.99995, 1.0)
    assert [bin_of(value) for value in high] == [*range(8, 20), 19]
    assert NUM_BINS == len(MIDPOINTS) == 20
    for value in (*low, *high):
        index, bounds = bin_of(value), (0.0, *EDGES, 1.0)
        assert index == sum(edge <= value for edge in EDGES)
        assert bounds[index] <= MIDPOINTS[index] <= bounds[index + 1]


def test_what_another_policy_asked_of_a_prompt_teaches_spide() -> None:
    seen = shadow([1, 2, 3], [[1, 0], [1, 1], [0, 0]], [[0.42, 0.42]] * 3)
    beside_del = parse_policy("del+spide", num_layers=4)
    beside_del.observe_prompt(seen)
    assert isinstance(beside_del.stopping, SpideStopping)
    assert [beside_del.stopping.table.seen[drafter][4] for drafter in EXITS] == [2, 2, 2]
    assert beside_del.stopping.table.rate(EXIT_2, 0.42) == pytest.approx((2 + 2 * 0.45) / 4)


def test_spide_stops_where_the_product_falls_to_tau() -> None:
    # Rates .9, .8, .9 (by hand into the table): .9 * .8 = .72 > .7 goes on, times .9 = .648 stops.
    policy = SpideStopping([1], num_layers=4, tau=0.7)
    for confidence, rate in ((0.75, 0.9), (0.55, 0.8)):
        policy.table.seen[EXIT_1][bin_of(confidence)] = 1e12  # so that the prior is worth nothing
        policy.table.accepted[EXIT_1][bin_of(confidence)] = 1e12 * rate
    policy.start_round(PLAN)
    drawn = [policy.stop_after_draw(row(depth, confidence=value), 0) for depth, value in enumerate((0.75, 0.55, 0.75))]
    assert drawn == [False, False, True]
    assert policy.reliability == pytest.approx(0.648)
    policy.start_round(PLAN)
    assert not policy.stop_after_draw(row(0, confidence=0.75), 0)
    assert not policy.stop_before_draw(row(0, confidence=0.0))


def test_the_prior_is_the_midpoint() -> None:
    table = AcceptanceTable([EXIT_1])
    assert table.rate(EXIT_1, 0.42) == pytest.approx(0.45)
    table.add(EXIT_1, 0.42, 1.0)  # (1 + 2 * .45) / (1 + 2)
    assert table.rate(EXIT_1, 0.42) == pytest.approx(1.9 / 3)
    assert table.rate(EXIT_1, 1.0) == 1.0
    assert AcceptanceTable([EXIT_1], "fine").rate(EXIT_1, 1.0) == pytest.approx(1 - 0.00005)


def test_tables_learn_from_drafts_and_from_shadow_tokens() -> None:
    table = AcceptanceTable([EXIT_1, EXIT_2])
    # Layer 1 drafted three, the second was rejected: the third has no fate. Row 2 of the shadow rows was not drafted.
    seen = shadow([1, 2], [[1, 0, 1], [0, 1, 1]], [[0.15, 0.25, 0.35], [0.15, 0.25, 0.35]])
    table.observe(finished(2, 1, exit_layer=1, confidences=[0.15, 0.25], seen=seen))
    assert [*table.seen[EXIT_1][1:4]] == [1, 1, 1]
    assert [*table.accepted[EXIT_1][1:4]] == [1, 0, 1]
    assert [*table.accepted[EXIT_2][1:4]] == [0, 1, 1]


def test_when_sampling_tables_learn_probabilities() -> None:
    table = AcceptanceTable([EXIT_1, EXIT_2])
    seen = shadow([1, 2], [[1, 1], [1, 1]], [[0.15, 0.25]] * 2, [[0.3, 0.4], [0.5, 0.6]])
    table.observe(finished(1, 1, exit_layer=1, confidences=[0.15], acceptance=[0.7], seen=seen))
    assert table.accepted[EXIT_1][1:3] == pytest.approx([0.7, 0.4])  # own draft, then a shadow row
    assert table.accepted[EXIT_2][1:3] == pytest.approx([0.5, 0.6])


def test_a_table_for_other_bins_is_refused() -> None:
    ours = AcceptanceTable([EXIT_1])
    with pytest.raises(ValueError, match="other bins"):
        ours.restore({**ours.state(), "edges": [0.5]})
    with pytest.raises(ValueError, match="lacks edges: it was saved by another version"):
        ours.restore({name: rows for name, rows in ours.state().items() if name != "edges"})
    assert ours.seen == AcceptanceTable([EXIT_1]).seen


FIRST = RoundContext(round_index=0, num_committed=4, remaining_tokens=50)


def test_the_layer_of_the_best_tpl() -> None:
    # Acceptance .5, .8, .9 of ten rows each at L = 4: layer 2 (test_cost works it out), whose d is 2.
    rows = [[0] + [1] * 5 + [0] * 4, [1] * 8 + [0] * 2, [1] * 9 + [0]]
    seen = shadow([1, 2, 3], rows, [[0.5] * 10] * 3)
    policy = DelExit(num_layers=4)
    assert policy.plan(FIRST) == Plan(exit_layer=1, max_speculations=1)  # nothing is known yet
    policy.observe_prompt(seen)
    plan = policy.plan(FIRST)
    assert (plan.exit_layer, plan.max_speculations) == (2, 18)
    assert plan.acceptance == pytest.approx({EXIT_1: 0.5, EXIT_2: 0.8, EXIT_3: 0.9})
    by_length = DelExit(num_layers=4, length="tpl")
    by_length.observe(finished(0, 0, seen=seen))
    assert by_length.plan(FIRST).max_speculations == 2
    by_length.reset()
    by_length.observe_prompt(shadow([1, 2, 3], [[0, 0]] * 3, [[0.5, 0.5]] * 3))
    assert by_length.plan(FIRST).exit_layer is None  # d = 0 is best
    limited = DelExit(num_layers=4, layers=[1, 3])
    limited.observe_prompt(seen)
    assert limited.plan(FIRST).exit_layer == 1
    limited.reset()
    assert limited.plan(FIRST) == Plan(exit_layer=1, max_speculations=1)


def test_lengths_end_before_d_max_in_the_release() -> None:
    # L = 4, layer 2 always right: 18 / 38 = .4737 at d = 17 and 19 / 40 = .475 at 18. Layer 1 with 25 of 29 has
    # .4749 at its best.
    seen = shadow([1, 2, 3], [[1] * 25 + [0] * 4, [1] * 29, [1] * 29], [[0.5] * 29] * 3)
    for name, exit_layer in (("del", 1), ("del:as=printed", 2)):
        policy = parse_policy(name, num_layers=4)
        policy.observe_prompt(seen)
        assert policy.exit.plan(FIRST).exit_layer == exit_layer


def test_what_is_long_ago_no_longer_stops() -> None:
    # .5 ** 1100 is 0 in float64: the mismatched row is as good as never seen.
    matches = DecayedMatches([1], omega=0.5)
    matches.observe(shadow([1], [[1, 0]], [[0.8, 0.12]]))
    for _ in range(1100):
        matches.observe(shadow([1], [[1]], [[0.8]]))
    assert (matches.acceptance(1), matches.threshold(1)) == (1.0, None)


@pytest.mark.parametrize("name", ["del", "ls:1-9+del", "del:as=printed"])
def test_a_new_text_starts_afresh(name: str) -> None:
    seen = shadow([1, 2, 3], [[1, 0]] * 3, [[0.8, 0.4]] * 3)
    policy = parse_policy(name, num_layers=4)
    assert isinstance(policy.stopping, DelThreshold)
    for forget in (policy.begin_text, policy.reset):
        policy.observe_prompt(seen)
        policy.observe(finished(1, 1, seen=seen))
        assert policy.stopping.threshold(EXIT_1) == pytest.approx(0.6)
        forget()
        assert policy.stopping.threshold(EXIT_1) is None
    assert not policy.learns
    with pytest.raises(ValueError, match="keeps nothing, but the saved state holds"):
        policy.restore({"exit": {"matches": {"1": [2.0, 0.5]}}, "stopping": {"matches": {}}})
