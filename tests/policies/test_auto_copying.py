"""How `auto` copies: what it learns of copied tokens, what it makes of it, and that it leaves other texts as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batched_runs import generator_of
from policies import MeasuredCost, RoundContext, RoundRecord, parse_policy
from policies.auto.chances import copy_confidence
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
    lengths = (2, 3, 4, 5, 6, 8, 12, 16, 32)
    plain = replace(finished(0, 0, cause="none"), exit_layer=None)
    policy.observe(replace(plain, copies=tuple((length, right) for length in lengths for _ in range(times))))
    policy.begin_text()
    return policy


def test_copies_as_long_as_it_pays() -> None:
    policy = taught(True, times=2)
    rate = max(policy.best.rate, 1 / ROWS.autoregressive())
    for length in (2, 4, 8, 33):
        chances = [policy.chances.of(-1, copy_confidence(length + index)) for index in range(MAX_COPY_LENGTH)]
        reliability = np.cumprod([1.0, *chances])
        values = [
            (reliability[: copied + 1].sum() - rate * ROWS.copying(copied), copied)
            for copied in range(MAX_COPY_LENGTH + 1)
        ]
        assert policy.plan(context(length)).copied == max(values)[1]


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
    policy = taught(True, times=0)
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
