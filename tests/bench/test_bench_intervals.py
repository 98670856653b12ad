"""Intervals over prompts by hand."""

import numpy as np
import pytest

import bench.report.interval_tables
from bench.report.interval_tables import drawn, interval, interval_tables
from tests.bench.test_bench_report import record

ENGINES = ("selfspec:ar", "selfspec:ls:1-2")


def counted_record():
    """Two prompts of two tasks. Plain: 99 tokens in 990 layers each; drafting: in 495 and 330 layers."""
    lines = record()
    layers = {"selfspec:ar": {"a1": 990, "b1": 990}, "selfspec:ls:1-2": {"a1": 495, "b1": 330}}
    for line in lines:
        if line.get("engine") in layers and line["kind"] == "sample":
            line["stats"] = {"loaded_layers": layers[line["engine"]][line["prompt"]], "preverifier_layers": 0}
    runs = {
        engine: [
            line for line in lines if line["kind"] == "sample" and line["engine"] == engine and line["repeat"] == 0
        ]
        for engine in ENGINES
    }
    return lines, runs


@pytest.fixture(autouse=True)
def two_are_enough(monkeypatch):
    monkeypatch.setattr(bench.report.interval_tables, "FEWEST", 2)


def test_few_prompts_have_no_intervals(monkeypatch):
    monkeypatch.setattr(bench.report.interval_tables, "FEWEST", 3)
    assert interval_tables(*counted_record()) == []


def test_draws_keep_the_number_of_prompts_of_each_task():
    draws = drawn(["a", "a", "a", "b"], 50)
    assert draws.shape == (50, 4)
    assert (draws[:, :3].sum(axis=1) == 3).all()
    assert (draws[:, 3] == 1).all()
    assert len({tuple(row) for row in draws}) > 5
    assert (draws == drawn(["a", "a", "a", "b"], 50)).all()


def test_an_interval_covers_what_other_prompts_might_have_given():
    """Shares of prompts right: of 100, 30 were. The normal interval is .3 +- 1.96 * sqrt(.3 * .7 / 100) = .21 to .39."""
    right = np.array([1.0] * 30 + [0.0] * 70)
    text = interval(lambda weights: weights @ right / weights.sum(-1), drawn(["a"] * 100))
    low, high = (float(end) for end in text.partition("(")[2].rstrip(")").split("–"))
    assert text.startswith("0.300 (")
    assert low == pytest.approx(0.21, abs=0.015)
    assert high == pytest.approx(0.39, abs=0.015)


def test_rows_are_divided_by_plain_decoding():
    """All of it: 198 tokens in 825 layers over 198 in 1980, 2.4. One prompt a task: every draw is the same."""
    (table,) = interval_tables(*counted_record())
    assert table.columns == ("policy", "eTPL over plain's", "tokens/s over plain's")
    # Drafting (50 + 25) / 2 tokens/s, plain (20 + 10) / 2.
    assert table.rows == (("`ls:1-2`", "2.400 (2.400–2.400)", "2.500 (2.500–2.500)"),)


def test_the_best_fixed_setting_is_a_second_yardstick():
    lines, runs = counted_record()
    cells = {"ls:1-1": [99, 660, 1.0], "ls:1-2": [99, 700, 1.0]}
    lines += [{"kind": "grid", "prompt": prompt, "task": prompt[0], "cells": cells} for prompt in ("a1", "b1")]
    (table,) = interval_tables(lines, runs)
    assert table.columns[2] == "over the best fixed setting's, `ls:1-1`"
    assert table.rows[0][2] == "1.600 (1.600–1.600)"  # 198 / 825 over 198 / 1320


def test_no_intervals_without_plain_decoding_or_prompts():
    lines, runs = counted_record()
    assert interval_tables(lines, {name: own for name, own in runs.items() if name != "selfspec:ar"}) == []
    one = [line for line in lines if line.get("prompt") != "b1"]
    assert interval_tables(one, {name: own[:1] for name, own in runs.items()}) == []
