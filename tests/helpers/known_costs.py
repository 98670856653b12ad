"""Costs that no clock measured, so that two runs of the benchmark decide alike."""

from __future__ import annotations

import pytest

import bench.machine
from policies import MeasuredCost


def know_costs(patch: pytest.MonkeyPatch) -> None:
    """Every `selfspec-bench run` measures the same seconds."""
    cost = MeasuredCost(num_layers=4, layer_seconds=(1e-3, 1.1e-3), head_seconds=(5e-4, 6e-4))
    patch.setattr(bench.machine, "measured_cost", lambda model, runner: cost)
