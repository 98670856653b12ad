"""The simulation of two stages, by hand, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.commands.bench_app import app
from policies import MeasuredCost
from selfspec.parallel.overlap_timing import Stages, best_lead, with_overlap, without_overlap

STAGES = Stages(draft=1.0, verify=(4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0), catch_up=0.5)


def test_all_accepted_by_hand() -> None:
    """4 drafts (4 s), then verifications of 4 (4 s each), beside each of which 4 more are drafted: 12 tokens by 16 s."""
    run = with_overlap([True] * 12, STAGES, rows=4, ahead=4)
    assert (run.tokens, run.seconds, run.verifications, run.verified, run.discarded) == (12, 16.0, 3, 12, 0)
    # One after the other: 4 + 0.5 + 4 for 5 tokens; twice, and once 1 draft and the bonus token in 1 + 0.5 + 4.
    alone = without_overlap([True] * 12, STAGES, 4)
    assert (alone.tokens, alone.seconds, alone.verifications) == (12, 22.5, 3)


def test_a_rejection_by_hand() -> None:
    """2 drafts (2 s) and their verification (4 s), while which 3 are drafted: the second is wrong, and these are thrown away.

    Anew behind the correction: 2 drafts (2 s), 4 s. 2 + 2 tokens in 12 s.
    """
    run = with_overlap([True, False, True, True], STAGES, rows=2, ahead=3)
    assert (run.tokens, run.seconds, run.verifications, run.verified, run.discarded) == (4, 12.0, 2, 4, 2)


def test_a_step_that_began_before_the_rejection_is_thrown_away_when_it_ends() -> None:
    """Drafts of 3 s, verification of 4 s: at 7 s one draft waits, and that which began at 6 s goes on in vain until 9.

    Then 3 s, 4 s for the second token, while which the third is drafted, and 4 s for that: 20 s.
    """
    slow = Stages(draft=3.0, verify=(4.0,), catch_up=0.0)
    run = with_overlap([False, True, True], slow, rows=1, ahead=9)
    assert (run.tokens, run.seconds, run.verifications, run.discarded) == (3, 20.0, 3, 2)


def test_on_one_bus_nothing_is_gained_by_working_at_once() -> None:
    """Each slows the other down by as much as it does itself: 8 drafts and 2 verifications take 16 s in any order."""
    shared = Stages(draft=1.0, verify=(4.0,) * 8, catch_up=0.0, contention=1.0)
    assert with_overlap([True] * 8, shared, rows=4, ahead=4).seconds == 16.0


@given(
    agrees=st.lists(st.booleans(), min_size=1, max_size=60),
    rows=st.integers(1, 8),
    ahead=st.integers(1, 12),
    draft=st.floats(0.1, 5),
)
def test_every_text_ends_and_is_never_faster_than_its_stages(
    agrees: list[bool], rows: int, ahead: int, draft: float
) -> None:
    stages = Stages(draft=draft, verify=(2.0, 2.5, 3.0), catch_up=0.1)
    run = with_overlap(agrees, stages, rows, ahead)
    assert run.tokens == len(agrees)
    assert run.seconds >= 2.0 * run.verifications
    assert run.seconds >= draft * run.verified - 1e-9  # what was verified was drafted, one after the other
    assert run.verified >= run.tokens - run.verifications  # a rejection gives one token more than was accepted


def test_the_command_reads_a_record(tmp_path: Path) -> None:
    cost = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.0, 1.0), head_seconds=(0.5, 0.5, 0.5))
    lines = [
        {"kind": "run"},
        {"kind": "costs", **cost.as_dict()},
        {
            "kind": "grid",
            "prompt": "a",
            "task": "t",
            "cells": {},
            "agreement": [],
            "agrees": {"1": "1101", "2": "1111"},
        },
    ]
    record = tmp_path / "record.jsonl"
    record.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = CliRunner().invoke(app, ["overlap", str(record), "--exit-layer", "2"])
    assert result.exit_code == 0, result.output
    assert "1.00" in result.output
    wrong = CliRunner().invoke(app, ["overlap", str(record), "--exit-layer", "3"])
    assert wrong.exit_code == 2
    assert "no exit layer 3: there are 1 to 2" in wrong.output


def test_a_record_without_traces_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text('{"kind": "run"}\n')
    result = CliRunner().invoke(app, ["overlap", str(record)])
    assert result.exit_code == 2
    assert "holds no traces and costs" in result.output


@pytest.mark.parametrize("handover", [0.0, 0.5])
def test_a_handover_is_paid_both_ways(handover: float) -> None:
    stages = Stages(draft=1.0, verify=(4.0, 4.0), catch_up=0.0, handover=handover)
    assert without_overlap([True, True], stages, 1).seconds == 1.0 + 4.0 + 2 * handover
    assert with_overlap([True], stages, rows=1, ahead=1).seconds == 1.0 + 4.0 + 2 * handover


def test_the_lead_follows_acceptance() -> None:
    """Where all is accepted the furthest lead is best that keeps both busy; where little is, a long one is thrown away."""
    sure, unsure = best_lead(STAGES, 1.0), best_lead(STAGES, 0.2)
    assert sum(sure) > sum(unsure)
    assert unsure[0] <= 2
