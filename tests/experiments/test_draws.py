"""`draws` times the same draws by operators and by kernels, and its table divides one by the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bench.experiments.draws.draws_command as draws_command
from bench.experiments.__main__ import app
from bench.experiments.draws.draws_tables import draws_headline, draws_tables
from bench.record import matching, read_record
from layerskip_models.kernels.check import native_works

needs_native = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")


@needs_native
def test_the_command(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    found = CliRunner().invoke(app, ["draws", "--vocabulary", "60,90", "--repeats", "3", "-o", str(record)])
    assert found.exit_code == 0, found.output
    lines = matching(read_record(record), "draw")
    settings = list(draws_command.SETTINGS)
    assert [(line["vocabulary"], line["setting"], line["way"]) for line in lines] == [
        (size, setting, way) for size in (60, 90) for setting in settings for way in ("operators", "kernels")
    ]
    assert all(len(line["seconds"]) == 3 and min(line["seconds"]) > 0 for line in lines)
    assert "From one row's logits to a token" in found.output


def test_without_kernels_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_command, "native_works", lambda *_: False)
    found = CliRunner().invoke(app, ["draws"])
    assert found.exit_code == 2 and "our own kernels are measured" in found.output


def test_the_table() -> None:
    lines = [
        {"kind": "run", "provenance": {"cpu": "A", "threads": 2, "kernels": "avx2"}},
        {"kind": "draw", "vocabulary": 5000, "setting": "plain", "way": "operators", "seconds": [3e-4, 4e-4, 9e-4]},
        {"kind": "draw", "vocabulary": 5000, "setting": "plain", "way": "kernels", "seconds": [1e-4, 1e-4, 2e-4]},
    ]
    (table,) = draws_tables(lines)
    assert table.rows == (("5,000", "plain", "400", "100", "4.0"),)
    assert "4.0 to 4.0 times as fast" in draws_headline(lines)
