"""Loading and start-up: what is read, what is loaded in a process of its own, and the tables by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.commands import load_command
from bench.commands.bench_app import app
from bench.machine import loading
from bench.machine.loading import read_speed
from bench.record import Line, read_record
from bench.report.machine_tables import load_tables

pytest.importorskip("gguf")
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its memory from Linux")


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one reader and by three, of files whose sizes three does not divide."""
    read: list[tuple[str, int, int]] = []
    monkeypatch.setattr(loading, "_read", lambda path, first, end: read.append((path.name, first, end)))
    files = [tmp_path / "a", tmp_path / "b"]
    for file, size in zip(files, (10, 4)):
        file.write_bytes(bytes(size))
    for readers in (1, 3):
        read.clear()
        assert read_speed(files, cached=True, readers=readers) > 0
        bytes_read = sorted((name, place) for name, first, end in read for place in range(first, end))
        assert bytes_read == [(file.name, place) for file in files for place in range(file.stat().st_size)]


def test_a_part_of_a_file_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_READ_BYTES", 3)
    (tmp_path / "a").write_bytes(bytes(10))
    loading._read(tmp_path / "a", 2, 10)


@linux
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("options", [["--cached"], []])
def test_a_record_of_loads_and_starts(
    options: list[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_command, "STARTS", {"selfspec --version": ["-m", "selfspec", "--version"]})
    record = tmp_path / "load.jsonl"
    command = ["load", "--model", str(checkpoint), "--repeats", "2", "--output", str(record)]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    loads = [line for line in lines if line["kind"] == "load"]
    assert [line["repeat"] for line in loads] == [0, 1]
    assert all(line["bytes"] == (checkpoint / "model.safetensors").stat().st_size for line in loads)
    assert all(line["peak"] >= line["base"] > 0 and line["held"] > 0 and line["seconds"] > 0 for line in loads)
    starts = [line for line in lines if line["kind"] == "start"]
    assert [(line["what"], line["repeat"]) for line in starts] == [("selfspec --version", 0), ("selfspec --version", 1)]
    assert str(tmp_path) not in json.dumps(lines) and str(checkpoint.parent) not in json.dumps(lines)
    report = CliRunner().invoke(app, ["report", str(record)])
    assert f"| {checkpoint.name} |" in report.output and "| selfspec --version |" in report.output


def made(**load: Any) -> list[Line]:
    """Loads at 2, 1 and 4 GB/s beside reads at 4, 4 and 2: shares .5, .25 and 2, whose median is .5."""
    lines: list[Line] = [{"kind": "run", "configuration": {"cached": False}, "engines": {}}]
    for seconds, read in ((2, 4e9), (4, 4e9), (1, 2e9)):
        memory = {"peak": 5e9, "held": 4.4e9, "base": 1e9, **load}
        speeds = {"bytes": 4e9, "seconds": seconds, "read_by_1": read, "read_by_2": 5e9}
        lines.append({"kind": "load", "model": "m", **speeds, **memory})
    return lines


def test_the_table_takes_the_median_of_shares() -> None:
    (table,) = load_tables(made())
    assert table.rows == (("m", "4.00", "2.00", "2.00", "4.00", "5.00", "0.50", "1.25", "1.10"),)
    (table,) = load_tables(made(peak=None, held=None))  # where the system does not tell
    assert table.rows[0][-2:] == ("–", "–")


def test_starts_are_shown_from_fastest_to_slowest() -> None:
    starts = [{"kind": "start", "what": "w", "seconds": s, "processor_seconds": 2 * s} for s in (0.3, 0.1, 0.2)]
    assert load_tables([*made(), *starts])[1].rows == (("w", "0.20", "0.10", "0.30", "0.40"),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model", "someone/somewhere"],
            "--model must be a folder with *.safetensors or a GGUF file on this machine",
        ),
        (["--model", "./none"], "no checkpoint folder at ./none"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["load", *options])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


@linux
@pytest.mark.usefixtures("forked_programs")
def test_a_checkpoint_that_does_not_load_says_why(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes()[:200])
    with pytest.raises(RuntimeError, match=f"{tmp_path.name} did not load: .*Error"):
        loading.loaded(tmp_path)
