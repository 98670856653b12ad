"""The studies of drafts in fewer bits: ways to round, and a model that is trained between two countings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from batched_runs import needs_native
from bench.experiments.__main__ import app
from bench.experiments.fewer_bits import weight_only_command
from bench.experiments.fewer_bits.fine_tuning import FineTuning
from bench.experiments.fewer_bits.roundings import Inputs, roundings, to_four_bits, with_feedback, with_scaled_inputs
from bench.record import matching, read_record
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama, tiny_tokenizer


def inputs_of(columns: int) -> Inputs:
    """Inputs of very different sizes, some of which go together."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, columns // 4, generator=generator) @ torch.randn(columns // 4, columns, generator=generator)
    x *= torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    return Inputs(second=x.double().T @ x.double(), size=x.abs().mean(dim=0))


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_ways_that_know_the_inputs_leave_a_smaller_error_of_the_products(group: int, symmetric: bool) -> None:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(2))
    inputs = inputs_of(128)

    def loss(rounded: torch.Tensor) -> float:
        error = (weight - rounded).double()
        return float((error @ inputs.second * error).sum())

    nearest, scaled, fed_back = (
        loss(way(weight, inputs, group=group, symmetric=symmetric))
        for way in (to_four_bits, with_scaled_inputs, with_feedback)
    )
    assert scaled < 0.8 * nearest
    assert fed_back < 0.8 * nearest


def test_every_way_has_a_name_and_is_near_the_weight() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(3))
    names = []
    for name, way in roundings(64):
        names.append(name)
        assert float((way(weight, inputs_of(128)) - weight).abs().mean()) < (0.02 if name.startswith("8 bits") else 0.2)
    assert len(set(names)) == 8


@needs_native
def test_drafts_of_old_weights_are_counted_apart_from_those_of_new_ones() -> None:
    network = tiny_llama(num_layers=3, hidden_size=64, head_dim=32, intermediate_size=128, late_scale=1.5, seed=3)
    tuning = FineTuning(
        network=network,
        generator=SelfSpecGenerator(network, tiny_tokenizer(), prefix_cache=0),
        rows=torch.randint(0, 20, (12, 16), generator=torch.Generator().manual_seed(0)),
        questions=[[3, 5, 7], [9, 1, 4, 2]],
        max_new_tokens=16,
        learning_rate=0.02,
    )
    told: list[str] = []
    lines = list(tuning.lines(told.append))
    assert len(told) == tuning.num_steps
    rates = {
        (line["weights"], line["copy"]): line["accepted"] / line["drafted"]
        for line in matching(lines, "acceptance", bits=8)
    }
    assert rates["before", "the same weights"] > 0.8
    assert rates["after", "the same weights"] > rates["after", "the weights before"] + 0.1


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    network = tiny_llama(num_layers=3, hidden_size=64, head_dim=32, intermediate_size=128, seed=3)
    network.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a bed"}\n{"prompt": "a fig"}\n', encoding="utf-8")
    arguments = ["roundings", str(tmp_path / "model"), "--prompts", str(prompts), "--group", "64", "--no-chat"]
    shown = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "8", "--output", str(tmp_path / "record.jsonl")])
    assert shown.exit_code == 0, shown.output
    lines = read_record(tmp_path / "record.jsonl")
    assert [line["tokens"] for line in matching(lines, "rounding")] == [8] * 8
    assert "error feedback (GPTQ)" in shown.output


def test_products_with_weights_in_fewer_bits_are_timed_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only_command, "SIZES", ((32, 64),))
    shown = CliRunner().invoke(app, ["weight-only", "--device", "cpu", "--rows", "1", "--rows", "3", "--repeats", "1"])
    assert shown.exit_code == 0, shown.output
    assert [line.split()[0] for line in shown.output.splitlines() if line.strip()[:1].isdigit()] == ["1", "3"]


@needs_native
@pytest.mark.usefixtures("forked_programs", "known_sources")
def test_the_memory_of_copies_is_compared_with_what_is_announced(tmp_path: Path) -> None:
    record = tmp_path / "copies.jsonl"
    asked = ["draft-copies", "synthetic:small", "--dtype", "bfloat16", "--repeats", "1", "--output", str(record)]
    command = [sys.executable, "-m", "bench.experiments", *asked]  # a process whose memory nothing else changes
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = matching(read_record(record), "copy")
    assert [line["bits"] for line in found] == [8, 4]
    more = 4_000_000  # what the process makes once, at the first copy
    assert all(0 < line["held"] <= line["most"] < 1.1 * line["announced"] + more for line in found)
    assert found[1]["announced"] < found[0]["announced"] < found[0]["weight_bytes"]
