"""Steered and unsteered exits, really run: what is counted, by hand, and that a run changes no greedy text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.steered_exits.steered_runs import Setting, SteeredRuns, counted_rounds
from bench.experiments.steered_exits.steered_tables import steered_tables
from bench.record import Line, read_record
from layerskip_models import from_transformers
from layerskip_models.exits.adapter import STEERED
from records import finished
from tests.fuzz.random_adapters import random_adapters
from tiny_llama import tiny_llama

SETTINGS = [
    Setting(exit_layer=2, num_speculations=length, temperature=heat) for heat in (0.0, 1.0) for length in (1, 3)
]


def test_rounds_are_counted_by_place() -> None:
    """Three drafts of which none, two and all are accepted, and a round without drafts at the end of a text."""
    rounds = [finished(3, accepted) for accepted in (0, 2, 3)] + [replace(finished(0, 0), exit_layer=None)]
    found = counted_rounds(rounds, 3)
    assert (found["rounds"], found["drafted"], found["accepted"]) == (3, 9, 5)
    assert found["tokens"] == 1 + 3 + 4
    assert found["reached"] == [3, 2, 2] and found["held"] == [2, 2, 1]


def test_every_form_is_run_and_no_greedy_text_changes() -> None:
    model = from_transformers(tiny_llama(num_layers=4, late_scale=0.5, seed=3), layout="plain")
    runs = SteeredRuns(model, [torch.tensor([5, 1, 7]), torch.tensor([2])], 12)
    steered = random_adapters(model, [2], form=STEERED)
    bare, found = [*runs.lines(None, SETTINGS, 0)], [*runs.lines(steered, SETTINGS, 0)]
    assert [line["temperature"] for line in found] == [0.0, 0.0, 1.0, 1.0]
    assert all(line["drafted"] >= line["accepted"] > 0 for line in bare)
    assert [line["held"] for line in found] != [line["held"] for line in bare]
    assert found[0]["adapter_layers"] > bare[0]["adapter_layers"] == 0
    runs._texts = [[1], [2]]
    with pytest.raises(ValueError, match="changed a greedy text"):
        [*runs.lines(steered, SETTINGS[:1], 0)]


def line(form: str, seed: int, accepted: int, **changes: Any) -> Line:
    """Ten rounds of one draft at exit 1 of 4 layers."""
    return {
        "kind": "rounds", "form": form, "seed": seed, "exit_layer": 1, "num_speculations": 1, "temperature": 0.0,
        "tokens": 10 + accepted, "rounds": 10, "drafted": 10, "accepted": accepted, "layers": 50, "adapter_layers": 0.0,
        "reached": [10], "held": [accepted], **changes,
    }  # fmt: skip


def test_tables_by_hand() -> None:
    """Plain decoding has a token for 4 layers: 15 tokens of 50 layers are 1.2 times as many, 14 for 60 are 0.933."""
    lines: list[Line] = [{"kind": "run", "configuration": {"num_layers": 4}}]
    lines += [line("low_rank", seed, accepted) for seed, accepted in enumerate((5, 5))]
    lines += [line("steered", seed, accepted, adapter_layers=1.0) for seed, accepted in enumerate((4, 8))]
    (table,) = steered_tables(lines)
    assert table.rows == (
        ("exit 1, 1 draft", "low rank", "0.500", "1.500", "1.200", "1.000"),
        (
            "exit 1, 1 draft", "steered", "0.600 (0.400 to 0.800)", "1.600 (1.400 to 1.800)", "1.067 (0.933 to 1.200)",
            "0.889 (0.778 to 1.000)",
        ),
    )  # fmt: skip


def test_a_form_that_does_not_draft_is_refused(tmp_path: Path) -> None:
    arguments = ["steered-exits", "--data", "text.txt", "--work", str(tmp_path), "--form", "layer"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "forms that draft are low_rank, steered, steered_wide" in result.stderr


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(
        "\n<|endoftext|>\n".join(f"Question {n}: what is {n} + {n}? " * 4 for n in range(9))
    )
    path = tmp_path / "record.jsonl"
    arguments = [
        "steered-exits", "--data", str(tmp_path / "text.txt"), "--work", str(tmp_path / "runs"), "--exit-layer", "1",
        "--seeds", "1", "--form", "steered", "--max-tokens", "100", "--epochs", "1", "--drafts", "2", "--num-samples", "1",
        "--max-new-tokens", "6", "--prompt-tokens", "16", "-o", str(path),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = [(one["form"], one["temperature"]) for one in read_record(path) if one["kind"] == "rounds"]
    assert found == [("none", 0.0), ("none", 1.0), ("steered", 0.0), ("steered", 1.0)]
