"""`python -m bench.experiments loading`, on files of a few kilobytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.loading import large_checkpoints
from bench.experiments.loading.loading_tables import loading_tables
from bench.record import read_record

pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its memory from Linux")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HIDDEN": 128, "INNER": 256, "HEADS": 2, "VOCAB": 96, "_BLOCK": 1 << 16}
    for name, size in sizes.items():
        monkeypatch.setattr(large_checkpoints, name, size)


@pytest.mark.usefixtures("forked_programs")
def test_a_record_of_both_files(tmp_path: Path) -> None:
    """Each is loaded from disk to memory, and nothing of the files is left."""
    record = tmp_path / "record.jsonl"
    result = CliRunner().invoke(
        app, ["loading", "--layers", "2", "--repeats", "1", "--folder", str(tmp_path), "--output", str(record)]
    )
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    loads = [line for line in lines if line["kind"] == "load"]
    assert [line["format"] for line in loads] == ["bfloat16", "Q8_0"]
    assert all(line["peak"] >= line["base"] > 0 and line["seconds"] > 0 for line in loads)
    assert [path.name for path in tmp_path.iterdir()] == ["record.jsonl"]
    assert "as a share of the speed of a plain read: bfloat16 at" in result.output


def test_the_table_takes_the_median_of_shares() -> None:
    """Loads at 2, 1 and 4 GB/s beside reads at 4, 4 and 2: shares .5, .25 and 2, whose median is .5."""
    lines = [{"kind": "run", "configuration": {}, "engines": {}}]
    for seconds, read in ((2, 4e9), (4, 4e9), (1, 2e9)):
        memory = {"peak": 5e9, "held": 4.4e9, "base": 1e9}
        lines.append(
            {"kind": "load", "format": "Q8_0", "bytes": 4e9, "seconds": seconds, "read_by_1": read, "read_by_2": 5e9}
            | memory
        )
    (table,) = loading_tables(lines)
    assert table.rows == (("Q8_0", "4.0", "4.00", "5.00", "2.00", "0.50", "1.25", "1.10"),)


def test_a_format_that_there_is_not() -> None:
    result = CliRunner().invoke(app, ["loading", "--formats", "Q9_0"])
    assert result.exit_code == 2 and "--formats must be of bfloat16, Q8_0" in result.output
