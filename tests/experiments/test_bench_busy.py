"""A busy machine, made on purpose: its processes do work and never outlive their block, and cells are bounded by time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.busy.busy import busy_processes, measure_cell
from bench.record import read_record
from bench.report.markdown import sections
from tiny_llama import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("with_studies")
def test_the_command_and_its_tables(tmp_path: Path) -> None:
    checkpoint, path = tmp_path / "tiny", tmp_path / "busy.jsonl"
    tiny_llama(seed=3).save_pretrained(checkpoint)
    tiny_tokenizer().save_pretrained(checkpoint)
    arguments = ["--model", str(checkpoint), "--num-samples", "1", "--prompt-tokens", "8", "--max-new-tokens", "4"]
    arguments += ["--processes", "1", "--seconds", "0.1", "--repeats", "2", "--device", "cpu", "--output", str(path)]
    result = CliRunner().invoke(app, ["busy", *arguments])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    cells = [line for line in lines if line["kind"] == "cell"]
    assert [(cell["repeat"], cell["busy"]) for cell in cells[::3]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for first in range(0, 12, 3):
        names = [cell["engine"] for cell in cells[first : first + 3]]
        assert sorted(names) == ["selfspec:ar", "selfspec:auto", "transformers:generate"]
    assert cells[0]["engine"] != cells[6]["engine"]  # each repeat starts with another one
    # The time limit ends a text, so a slow machine may leave one token of it, and only after the limit.
    assert all(cell["tokens"] >= 1 and cell["seconds"] >= 0.1 for cell in cells)
    for cell in cells:  # so that tables do not depend on this machine
        cell.update(tokens=100 if cell["busy"] == 0 else 30, seconds=2.0, cpu_seconds=3.0)
    parts = sections(lines)
    assert "| plain | 50.0 | 15.0 (0.30) |" in parts["speed"]
    assert "| fair share |  | (0.50) |" in parts["speed"]
    assert "| auto | 30.00 | 100.00 |" in parts["cost"]
    assert "plain 0.30, auto 0.30, transformers generate 0.30" in parts["headline"]


def test_busy_processes_compute_and_are_gone_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), busy_processes(2, 30) as running:
        assert len(running) == 2 and all(map(alive, running))
        raise KeyboardInterrupt
    assert not any(map(alive, running))


@pytest.mark.slow
def test_busy_processes_do_not_outlive_one_that_is_killed_or_their_time() -> None:
    program = """
import os
from bench.experiments.busy.busy import busy_processes
with busy_processes(1, 30) as running:
    print(running[0], flush=True)
    os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    killed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    with busy_processes(1, 0.05) as (short,):
        late = time.monotonic() + 10
        while any(map(running_now, (int(killed.stdout), short))):
            assert time.monotonic() < late
            time.sleep(0.05)


def running_now(process: int) -> bool:
    """Alive, and not only waiting to be asked for its exit status."""
    try:
        return (
            subprocess.run(
                ["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=True
            ).stdout.strip()[0]
            not in "Z"
        )
    except (subprocess.CalledProcessError, IndexError):
        return False


def test_a_cell_is_bounded_by_time_whatever_the_engine_does() -> None:
    class Slow:
        name = label = "slow"

        def __init__(self) -> None:
            self.given: list[float] = []

        def decode(self, prompt: Tensor, max_new_tokens: int, seconds: float) -> int:
            self.given.append(seconds)
            time.sleep(min(0.04, seconds))
            return 2

    engine = Slow()
    cell = measure_cell(engine, [torch.tensor([1])], 128, 0.1, torch.device("cpu"))
    assert engine.given[0] == pytest.approx(0.1, abs=0.02)
    assert engine.given == sorted(engine.given, reverse=True)
    assert cell["tokens"] == 2 * len(engine.given) and 0.1 <= cell["seconds"] < 5
