"""What one acceptance rate foretells, against rounds that are drawn at random."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.predictions.one_rate import (
    best_fixed_length,
    finite_state,
    fitted_rate,
    fixed_length,
    oracle_length,
    tokens_of_round,
)
from bench.experiments.predictions.published import MODELS, TASKS
from bench.record import read_record
from bench.report.markdown import markdown

EXIT_LAYER, NUM_LAYERS = 3, 16


def drawn(rate: float, length: int, draw: Random) -> int:
    """Accepted drafts of one round."""
    return next((place for place in range(length) if draw.random() >= rate), length)


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
def test_rounds_drawn_at_random(rate: float) -> None:
    draw, rounds = Random(0), 40_000
    assert sum(drawn(rate, 6, draw) + 1 for _ in range(rounds)) / rounds == pytest.approx(
        tokens_of_round(rate, 6), rel=0.02
    )
    length, tokens, layers = 6, 0, 0
    for _ in range(rounds):
        accepted = drawn(rate, length, draw)
        tokens, layers = tokens + accepted + 1, layers + length * EXIT_LAYER + NUM_LAYERS
        length = length + 1 if accepted == length else max(length - 1, 1)
    assert tokens / layers == pytest.approx(finite_state(rate, EXIT_LAYER, NUM_LAYERS), rel=0.02)
    tokens = layers = 0
    for _ in range(rounds):
        accepted = drawn(rate, 10**6, draw)
        tokens, layers = tokens + accepted + 1, layers + accepted * EXIT_LAYER + NUM_LAYERS
    assert tokens / layers == pytest.approx(oracle_length(rate, EXIT_LAYER, NUM_LAYERS), rel=0.02)


@given(st.floats(0, 0.99), st.integers(1, 12), st.integers(1, 7))
def test_a_rate_is_found_again_and_bounds_hold(rate: float, length: int, exit_layer: int) -> None:
    etpl = fixed_length(rate, length, exit_layer, NUM_LAYERS)
    assert fitted_rate(etpl, length, exit_layer, NUM_LAYERS) == pytest.approx(rate, abs=1e-6)
    best = best_fixed_length(rate, exit_layer, NUM_LAYERS)
    assert etpl <= best * (1 + 1e-12) and best <= oracle_length(rate, exit_layer, NUM_LAYERS) * (1 + 1e-12)
    assert finite_state(rate, exit_layer, NUM_LAYERS) <= oracle_length(rate, exit_layer, NUM_LAYERS) * (1 + 1e-12)


def test_what_no_rate_gives() -> None:
    with pytest.raises(
        ValueError, match=r"no acceptance rate gives 0\.5 tokens per layer with 6 drafts of exit layer 3"
    ):
        fitted_rate(0.5, 6, 3, 16)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    result = CliRunner().invoke(app, ["predictions", "-o", str(path)])
    assert result.exit_code == 0, result.output
    lines = [line for line in read_record(path) if line["kind"] == "prediction"]
    assert len(lines) == len(MODELS) * len(TASKS)
    assert all(line["best_fixed_length"] >= line["fixed"] - 1e-9 for line in lines)
    assert "| LLaMA-2-70B |" in markdown(read_record(path))
