"""More threads than cores, the parts of a phase, and the model of larger machines."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.cores import cores_command
from bench.experiments.cores.pool_model import Machine, Pass
from bench.experiments.cores.pool_parts import PARTS, measure_parts
from bench.record import matching, read_record
from bench.report.markdown import sections
from layerskip_models.kernels.check import native_works
from tiny_llama import tiny_llama, tiny_tokenizer

needs_team = pytest.mark.skipif(
    not native_works(torch.device("cpu"), torch.float32)
    or not hasattr(os, "sched_getaffinity")
    or len(os.sched_getaffinity(0)) < 2
    or shutil.which("cc") is None,
    reason="needs our kernels, two processors and a compiler",
)


@needs_team
@pytest.mark.usefixtures("with_studies")
def test_the_command_and_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_command, "measure_bandwidth", lambda device: 1e9)
    checkpoint, path = tmp_path / "tiny", tmp_path / "cores.jsonl"
    tiny_llama(seed=3, max_position_embeddings=256).save_pretrained(checkpoint)
    tiny_tokenizer().save_pretrained(checkpoint)
    arguments = ["--model", str(checkpoint), "--threads", "1,3", "--max-new-tokens", "4", "--seconds", "0.02"]
    result = CliRunner().invoke(app, ["cores", *arguments, "--repeats", "2", "--output", str(path)])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    cells, own = matching(lines, "cell"), lines[0]["provenance"]["cores"]
    counts = sorted({1, 3, own})
    assert {(cell["threads"], cell["what"], cell["repeat"]) for cell in cells} == {
        (count, what, repeat) for count in counts for what in ("ar", "auto", "prompt") for repeat in (0, 1)
    }
    assert {line["name"] for line in matching(lines, "part")} == set(PARTS)
    for line in lines:  # so that tables do not depend on this machine
        if line["kind"] == "cell":
            line.update(tokens=100 if line["threads"] == own else 30, seconds=2.0)
        elif line["kind"] == "part":
            line.update(nanoseconds=50.0)
        elif line["kind"] == "bandwidth":
            line.update(bytes_per_second=20e9, threads=2)
    parts = sections(lines)
    assert "plain decoding 0.30" in parts["headline"] or max(counts) == own
    assert "| plain decoding | 15 (0.30) |" in parts["threads"]
    assert "| a store, until another core has read it |" in parts["pool_parts"]
    # 8 threads: 7 others in the same cache, 50 ns * (1 + 7 / 4) and 50 ns * (1 + 7).
    assert "| a phase, µs | 0.1 to 0.4 |" in parts["pool_model"]
    wrong = CliRunner().invoke(app, ["cores", "--threads", "0"])
    assert wrong.exit_code == 2 and "--threads" in wrong.output


def test_the_model_by_hand() -> None:
    machine = Machine(near=50e-9, thread_bytes=10e9, far=100e-9, other=200e-9, group=2, socket=4, socket_bytes=30e9)
    assert machine.phase(1, 1) == 0
    assert machine.transfer(2) == pytest.approx(50e-9)
    assert machine.transfer(4) == pytest.approx((50e-9 + 2 * 100e-9) / 3)
    assert machine.transfer(6) == pytest.approx((50e-9 + 2 * 100e-9 + 2 * 200e-9) / 5)
    assert machine.phase(6, 5) == pytest.approx(2 * machine.transfer(6))
    # Two threads read 20 GB/s, four are limited by their socket, six have two sockets.
    assert [machine.reading(count, 60e9) for count in (2, 4, 6)] == pytest.approx([3.0, 2.0, 1.0])
    one = Pass(num_bytes=60e9, phases=10**7)
    assert one.share(machine, 2, 1) == pytest.approx(1.0 / (1.0 + 3.0))
    medium = Pass.of("medium", 2.0)
    assert medium.phases == 24 * 6 + 1
    # 24 layers of 1024 * (16 + 2 * 8 + 16) * 64 + 3 * 1024 * 2816 weights, and a head of 32000 * 1024.
    assert medium.num_bytes == 2 * (24 * (1024 * 48 * 64 + 3 * 1024 * 2816) + 32000 * 1024)


def test_without_a_compiler_or_processors_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
        monkeypatch.setenv("PATH", "/nothing")
        with pytest.raises(ValueError, match="needs a compiler"):
            next(measure_parts(2))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    with pytest.raises(ValueError, match="two processors"):
        next(measure_parts(2))
