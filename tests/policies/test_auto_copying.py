"""How `auto` copies: what it learns of copied tokens, what it makes of it, and that it leaves other texts as they were."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from batched_runs import generator_of
from policies import MeasuredCost, RoundContext, RoundRecord, parse_policy
from policies.auto.constants import TUNING
from policies.auto.copy_values import CopyTable, best_copy
from policies.auto.drift import CostDrift
from policies.auto.policy import AutoExit
from policies.fixed import MAX_COPY_LENGTH
from records import finished
from scripted_policies import made_up_cost

# Rows cost a seventh of a plain step each.
ROWS = MeasuredCost(
    num_layers=6, layer_seconds=(1.0, 1.15, 1.3), head_seconds=(1.0, 1.15, 1.3), draft_seconds=0.1, fixed=True
)


def context(match_length: int, batch_size: int = 1) -> RoundContext:
    return RoundContext(
        round_index=0, num_committed=50, remaining_tokens=60, batch_size=batch_size, match_length=match_length
    )


def taught(right: bool, times: int = 40) -> AutoExit:
    policy = AutoExit(num_layers=6, cost=ROWS)
    for length in (2, 3, 4, 5, 6, 8, 12, 16, 32):
        policy.learner.copies.observe([(length, right)] * times)
    return policy


def test_learns_how_often_a_match_of_each_length_is_right() -> None:
    table = CopyTable()
    before = [table.chance(length) for length in range(2, 40)]
    assert before == sorted(before) and 0 < before[0] < before[-1] < 1
    table.observe([(3, True)] * 30 + [(9, False)] * 30)
    assert table.chance(3) > 0.9 and table.chance(11) < 0.15
    assert table.chance(2) == before[0] and table.chance(12) == before[10]
    table.observe([(3, False)] * int(TUNING.copy_memory))  # the latest ones count most
    assert table.chance(3) < 0.35
    again = CopyTable()
    again.restore(table.state())
    assert [again.chance(length) for length in range(2, 40)] == [table.chance(length) for length in range(2, 40)]
    with pytest.raises(ValueError, match="match lengths"):
        again.restore({"right": [1.0], "seen": [2.0]})


def test_copies_as_long_as_it_pays() -> None:
    """Brute force over the lengths: tokens less rate times cost."""
    table, costs = CopyTable(), [ROWS.copying(copied) for copied in range(MAX_COPY_LENGTH + 1)]
    table.observe([(4, True)] * 9 + [(4, False)])
    for rate, length in product((0.05, 0.14, 0.3, 1.0), (2, 4, 8, 33)):
        reliability = np.cumprod([1.0, *(table.chance(length + index) for index in range(MAX_COPY_LENGTH))])
        values = [
            (reliability[: copied + 1].sum() - rate * ROWS.copying(copied), copied)
            for copied in range(1, MAX_COPY_LENGTH + 1)
        ]
        choice = best_copy(table, costs, length, rate)
        assert (choice.value, choice.copied) == pytest.approx(max(values))


def test_plans_a_copy_where_it_was_right_and_none_where_it_was_wrong() -> None:
    right, wrong = taught(True), taught(False)
    assert right.plan(context(8)).copied > 8
    assert wrong.plan(context(8)).copied == 0
    assert wrong.plan(context(8)) == AutoExit(num_layers=6, cost=ROWS, copy=False).plan(context(8))
    assert right.plan(context(0)).copied == 0
    # In company rows cost more than they save.
    assert right.plan(context(8, batch_size=64)).copied <= right.plan(context(8)).copied


def copied_record(copied: int, accepted: int) -> RoundRecord:
    return replace(finished(copied, accepted), exit_layer=None, num_copied=copied)


def test_a_rate_that_copies_have_raised_is_a_higher_price() -> None:
    policy = taught(True, times=3)
    before = policy.plan(context(8)).copied
    for _ in range(60):
        policy.observe(copied_record(20, 20))
    assert policy.plan(context(8)).copied < before
    policy.begin_text()
    assert policy.plan(context(8)).copied == before


def run(name: str, new: int, **options: Any) -> tuple[list[int], list[RoundRecord]]:
    policy = parse_policy(name, num_layers=4, measure=lambda: made_up_cost(4))
    made = generator_of("plain").generate([3, 1, 4, 1, 5], max_new_tokens=new, policy=policy, trace=True, **options)
    assert made.trace is not None
    return made.new_tokens, [*made.trace]


def test_a_text_that_is_in_the_store_is_copied() -> None:
    plain, rounds = run("ar", 50)
    text, records = run("auto", 50, copy_from=[[3, 1, 4, 1, 5, *plain]])
    assert text == plain
    assert len(records) < len(rounds) / 4
    assert sum(found.num_copied for found in records) > 30
    with pytest.raises(ValueError, match="copy_from changes nothing with policy 'auto:copy=off'"):
        run("auto:copy=off", 50, copy_from=[plain])


def test_a_text_that_does_not_repeat_is_decoded_as_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round: what was never seen before changes no plan."""
    monkeypatch.setattr("selfspec.cache.copy_index.CopyIndex.match", property(lambda self: None))
    facts = [
        [
            (record.exit_layer, record.draft_tokens, record.num_accepted, record.stop_cause)
            for record in run(name, 40)[1]
        ]
        for name in ("auto", "auto:copy=off")
    ]
    assert facts[0] == facts[1]


def test_rounds_that_copy_say_nothing_of_drafting_and_plain_steps() -> None:
    drift = CostDrift(ROWS)
    copied = replace(copied_record(5, 3), draft_seconds=9.0, verify_seconds=90.0)
    assert not any(drift.observe(copied) for _ in range(200))
    assert not any(drift._ratios.values())
