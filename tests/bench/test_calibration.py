"""Calibrated costs: shape and order of the numbers, remembered per model. No test looks at how fast anything is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import bench.calibration
from bench.calibration import _every_row, _timed, calibrate
from layerskip_models import LayerSkipModel, from_transformers
from selfspec.engine.expected_cost import expected_cost
from tiny_llama import tiny_llama


def test_it_times_every_number_of_rows() -> None:
    cost = calibrate(from_transformers(tiny_llama(seed=1), layout="plain"))
    for seconds in (cost.layer_seconds, cost.head_seconds):
        assert len(seconds) == 13
        assert all(0 < a <= b for a, b in itertools.pairwise(seconds))
    assert cost.description.startswith("cpu float32")


def test_a_call_is_made_once_before_it_is_timed() -> None:
    """Twice, here, where no seconds are spent on timing."""
    made: list[int] = []
    assert len(_timed([partial(made.append, 0), partial(made.append, 1)], torch.device("cpu"))) == 2
    assert made == [0, 1] * 3


def test_every_time_is_that_of_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts rows instead: a pass takes 4 s for every row, and a head 1 s."""
    model = from_transformers(tiny_llama(seed=1), layout="plain")
    ran: list[float] = []

    def counted(original: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(self: LayerSkipModel, hidden: Tensor, *rest: Any) -> Any:
            ran.append(seconds * len(hidden))
            return original(self, hidden, *rest)

        return run

    def timed(calls: list[Callable[[], object]], *rest: object) -> list[float]:
        seconds = []
        for call in calls:
            ran.clear()
            call()
            seconds.append(sum(ran))
        return seconds

    monkeypatch.setattr(LayerSkipModel, "run_layers", counted(LayerSkipModel.run_layers, 4.0))
    monkeypatch.setattr(LayerSkipModel, "choices", counted(LayerSkipModel.choices, 1.0))
    monkeypatch.setattr(bench.calibration, "_timed", timed)
    cost = calibrate(model)
    assert cost.layer_seconds == pytest.approx([4 * rows / model.num_layers for rows in range(1, 14)])
    assert cost.head_seconds == pytest.approx(range(1, 14))
    estimate = expected_cost(model)
    assert cost.draft_seconds / 5 == pytest.approx(estimate.draft_seconds / estimate.autoregressive())


def test_rows_between_the_timed_ones() -> None:
    # 2 rows came out cheaper than 1: held at 1. Halfway between 2 and 4 rows: (1 + 3) / 2.
    assert _every_row((1, 2, 4), [1.0, 0.5, 3.0]) == (1.0, 1.0, 2.0, 3.0)
