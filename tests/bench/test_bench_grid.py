"""Fixed settings as a yardstick, by hand: in hindsight, from the other half, all prompts of a task pooled."""

from __future__ import annotations

import pytest

from bench.grid import SECONDS, fixed_from_other_half, fixed_in_hindsight, pooled, with_setting
from bench.record import Line

A, B = "ls:1-1", "ls:2-2"


def line(prompt: str, task: str, a: tuple[float, float], b: tuple[float, float]) -> Line:
    cells = {A: [*a, a[1] / 10], B: [*b, b[1] / 10]}
    return {"kind": "grid", "prompt": prompt, "task": task, "cells": cells}


GRID = [
    line("1", "code", (10, 20), (10, 10)),  # half 0: the second setting, 1.0 against .5
    line("2", "code", (10, 10), (10, 40)),  # half 1: the first, 1.0 against .25
    line("3", "prose", (10, 10), (10, 50)),
    line("4", "prose", (10, 10), (10, 50)),
]


def test_in_hindsight() -> None:
    # code: the first setting makes 20 tokens of 30 layers, the second 20 of 50.
    best = fixed_in_hindsight(GRID)
    assert best == {"code": A, "prose": A, "all": A}
    assert with_setting(GRID, best) == {"code": 20 / 30, "prose": 1.0, "all": 40 / 50}
    assert with_setting(GRID, {"code": B, "all": A}) == {"code": 20 / 50, "prose": 1.0, "all": 40 / 70}
    assert with_setting(GRID, best, SECONDS)["code"] == pytest.approx(20 / 3)


def test_from_the_other_half() -> None:
    # Prompt 1 is scored with what was best on prompt 2, the first setting (10 of 20); 2 with the second (10 of 40).
    assert fixed_from_other_half(GRID) == {"code": 20 / 60, "prose": 1.0, "all": 40 / 80}
    assert set(fixed_from_other_half(GRID[:3])) == {"code", "all"}  # a kind with a single prompt has no other half


def test_pooled() -> None:
    assert pooled([("a", 1, 2), ("b", 3, 2)]) == {"a": 0.5, "b": 1.5, "all": 1.0}
