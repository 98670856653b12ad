"""What the machine gives: peak memory, bytes that rounds move, bandwidth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bench.machine.bandwidth
from bench.machine.bandwidth import WeightBytes, measure_bandwidth
from bench.machine.memory import peak_bytes
from bench.provenance import program
from layerskip_models import from_transformers
from tiny_llama import tiny_llama


def test_peak_memory_counts_what_is_alive() -> None:
    megabyte = 1 << 18  # floats

    def call() -> None:
        first = torch.zeros(megabyte)
        second = first + 1
        del first
        third = second + 1
        del second, third

    assert 2 << 20 <= peak_bytes(torch.device("cpu"), call) < (2 << 20) + 10_000


def test_a_profile_that_saw_nothing_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([0, 0, 7])
    monkeypatch.setattr("bench.machine.memory._profiled_peak", lambda call: next(peaks))
    assert peak_bytes(torch.device("cpu"), list) == 7


def test_bytes_that_rounds_move() -> None:
    model = from_transformers(tiny_llama(num_layers=3, seed=1), layout="plain")
    weights = WeightBytes.of(model)
    layer = model._layers[0]
    assert weights.layer == 4 * (sum(matrix.weight.numel() for matrix in layer.linears) + 2 * model.hidden_size)  # type: ignore[attr-defined]
    stats = {
        "num_prompt_tokens": 6,
        "num_new_tokens": 8,
        "loaded_layers": 4,
        "preverifier_layers": 1,
        "rounds": 2,
        "num_drafted": 3,
    }
    assert weights.moved(stats) == 5 * (weights.layer + 10 * weights.kv) + 5 * weights.head


def test_bandwidth_is_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # measured as the commands measure it, but not for a second
    monkeypatch.setattr(bench.machine.bandwidth, "_SECONDS", 0.0)
    assert 1e8 < measure_bandwidth(torch.device("cpu")) < 1e13


def test_a_record_names_the_program_that_made_it() -> None:
    folder = Path(bench.__file__).parent
    assert program(str(folder / "experiments" / "__main__.py")) == "python -m bench.experiments"
    assert program(str(folder / "__main__.py")) == program("/usr/bin/selfspec-bench") == "selfspec-bench"
