"""Estimated costs: what must hold of any, and that a kept cost goes before it. How near they come is measured elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.draft_weights import drafter_of
from policies import MeasuredCost
from selfspec.engine import expected_cost as estimates
from selfspec.engine.expected_cost import StoredMatrix, expected_cost
from selfspec.engine.kept_costs import keep_cost
from tiny_llama import tiny_llama


def model(layout: str = "native") -> LayerSkipModel:
    return from_transformers(tiny_llama(seed=1, hidden_size=64, vocab_size=320), layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["plain", "native", "int8", "int4"])
def test_costs_rise_with_rows_and_the_model_never_runs(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model(layout)
    monkeypatch.setattr(LayerSkipModel, "run_layers", None)
    cost = expected_cost(one)
    for seconds in (cost.layer_seconds, cost.head_seconds):
        assert all(0 < a < b < 2 * a for a, b in itertools.pairwise(seconds))
    assert cost.num_layers == one.num_layers and cost.rounded == ()


def test_fewer_bits_cost_less_where_weights_come_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "last_cache", lambda: 0)
    one = model()
    offered = dict(expected_cost(one, bits=(4, 8)).rounded)
    steps = [cost.autoregressive() for cost in (offered[4], offered[8], expected_cost(one))]
    assert steps == sorted(steps) and steps[0] < steps[2]
    drafter_of(one, 8)  # is priced alike once it is there, unasked
    assert expected_cost(one).rounded == ((8, offered[8]),)


@pytest.mark.parametrize(("bits", "rows", "drafted"), [(16.0, 32, (8.1, 24)), (8.5, 16, (8.5, 16)), (4.6, 8, (4.6, 8))])
def test_a_matrix_is_rounded_if_it_has_more_bits(bits: float, rows: int, drafted: tuple[float, int]) -> None:
    assert StoredMatrix(96, bits, rows).rounded(8, 24) == StoredMatrix(96, *drafted)


def test_a_kept_cost_goes_first_and_estimates_are_in_its_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    one = model()
    before = expected_cost(one, bits=(8,))
    scaled = [tuple(3 * value for value in values) for values in (before.layer_seconds, before.head_seconds)]
    kept = MeasuredCost(one.num_layers, layer_seconds=scaled[0], head_seconds=scaled[1], description="kept")
    keep_cost(one, "eager", kept)
    found = expected_cost(one, bits=(8,))
    assert replace(found, rounded=()) == kept
    assert found.rounded[0][1].autoregressive() == pytest.approx(3 * before.rounded[0][1].autoregressive())
    keep_cost(one, "eager", replace(kept, rounded=((8, kept),)))
    assert expected_cost(one, bits=(8,)).rounded == ((8, kept),)
