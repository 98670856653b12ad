"""`python -m bench.experiments row-parts`: what parts of rows change in a model's own texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.row_parts.row_parts import Difference
from bench.record import matching, read_record


def test_a_record_of_parts_and_digits(tmp_path: Path, checkpoint: Path) -> None:
    """More parts are nearer to float64, and three as near as float32."""
    record = tmp_path / "record.jsonl"
    arguments = [
        "row-parts",
        str(checkpoint),
        "--num-texts",
        "2",
        "--prompt-tokens",
        "20",
        "--max-new-tokens",
        "3",
        "--output",
        str(record),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    for kind, names in (("bfloat16", ("1 part", "2 parts", "3 parts")), ("int8", ("1 digit", "2 digits", "3 digits"))):
        ways = {line["rows"]: line for line in matching(lines, "way", weights=kind)}
        assert list(ways) == ["float32", *names]
        assert all(line["positions"] == 6 for line in ways.values())
        one, two, three = (ways[name]["divergence"] for name in names)
        assert one > 100 * two > 100 * three and ways[names[2]]["logit"] < 10 * ways["float32"]["logit"]
    assert "2 greedy texts" in result.output


def test_differences_are_counted() -> None:
    """Two positions, of which one gets another token that was .5 behind."""
    exact = torch.tensor([[2.0, 1.5, 0.0], [0.0, 1.0, 0.5]]).double().log_softmax(-1)
    found = torch.tensor([[1.4, 1.5, 0.0], [0.0, 1.0, 0.5]]).double().log_softmax(-1)
    counted = Difference()
    counted.add(found, exact)
    counted.add(exact, exact)
    assert (counted.positions, counted.tokens, counted.texts) == (4, 1, 1)
    assert counted.margin == pytest.approx(0.5) and counted.divergence > 0


def test_weights_of_an_unknown_kind() -> None:
    result = CliRunner().invoke(app, ["row-parts", "--weights", "int3"])
    assert result.exit_code == 2 and "--weights must be of int8, bfloat16" in result.output
