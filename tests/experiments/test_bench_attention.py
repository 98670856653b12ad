"""Attention over a long context beside memory and arithmetic: the ratio by hand, the whole command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bench.experiments.attention.attention_time
from bench.experiments.__main__ import app
from bench.experiments.attention.attention_tables import over_reading
from bench.experiments.attention.attention_time import HeadShape
from bench.record import Line, read_record
from bench.report.markdown import sections
from test_native import needs_native


def test_the_ratio_by_hand() -> None:
    """1000 bytes in 6 and in 4 seconds, at 250 bytes a second before the first and 500 before the second: 1.5 and 2."""
    one, two = ({"kind": "attention", "seconds": seconds, "bytes": 1000} for seconds in (6.0, 4.0))
    lines: list[Line] = [
        {"kind": "machine", "bytes_per_second": 250},
        one,
        {"kind": "machine", "bytes_per_second": 500},
        two,
    ]
    assert over_reading(lines, [one, two]) == pytest.approx(1.75)


def test_what_heads_take() -> None:
    shape = HeadShape.of("llama3-8B", torch.bfloat16)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 8, 128)
    assert shape.layer_bytes(16384) == 2 * 8 * 128 * 2 * 16384  # keys and values, heads, numbers, bytes, positions
    assert shape.layer_products(4, 100) == 2 * 4 * 32 * 128 * 100
    with pytest.raises(ValueError, match="--shape must be one of small, medium, "):
        HeadShape.of("huge", torch.float32)


@needs_native
@pytest.mark.usefixtures("with_studies")
def test_the_command_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.experiments.attention.attention_time, "_BYTES", 1)
    monkeypatch.setattr(bench.experiments.attention.attention_time, "_PRODUCTS", 2)
    monkeypatch.setattr(bench.experiments.attention.attention_time, "measure_bandwidth", lambda device: 1e9)
    record = tmp_path / "attention.jsonl"
    arguments = ["attention", "--shape", "small", "--context", "600", "--rows", "1,5", "--repeats", "2"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(record)])
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    found = [line for line in lines if line["kind"] == "attention"]
    assert [(line["kv_dtype"], line["rows"], line["repeat"]) for line in found] == [
        (kept, rows, repeat) for repeat in (0, 1) for kept in ("float32", "bfloat16") for rows in (1, 5)
    ]
    assert all(line["seconds"] > 0 for line in found)
    parts = sections(lines)
    assert set(parts) == {"headline", "age", "attention", "machine"}
    assert "Attention after 600 positions" in parts["headline"]
    assert len(parts["attention"].splitlines()) == 4 + 2 * 2
    for wrong, message in (
        (["--kv-dtype", "float16"], "--kv-dtype must be float32 or bfloat16"),
        (["--rows", "601"], "--rows must be at most the context's 600 positions"),
        (["--shape", "huge"], "--shape must be one of"),
    ):
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert refused.exit_code == 2
        assert message in refused.stderr
