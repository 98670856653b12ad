"""What the machine gives: peak memory, bytes that rounds move, bandwidth."""

from __future__ import annotations

import pytest
import torch

import bench.machine.bandwidth
from bench.machine.bandwidth import WeightBytes, measure_bandwidth
from bench.machine.memory import peak_bytes
from bench.provenance import computed_in, cpu_fields, host_kind, provenance
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


def test_a_new_record_says_where_it_ran() -> None:
    where = provenance(torch.device("cpu"), torch.float32)
    assert where["host"] == host_kind(cpu_fields())
    assert host_kind({"flags": "fpu hypervisor"}, containers=()) == "virtual machine"
    assert host_kind({"flags": "fpu"}, containers=(__file__,)) == "physical machine, in a container"
    assert host_kind({}) is None


def test_weights_in_16_bits_run_on_the_kernels_that_a_record_names() -> None:
    cpu = torch.device("cpu")
    assert computed_in(cpu, torch.bfloat16) == torch.float32
    assert computed_in(cpu, torch.float64) == torch.float64
    assert computed_in(torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert provenance(cpu, torch.bfloat16)["kernels"] == provenance(cpu, torch.float32)["kernels"]
