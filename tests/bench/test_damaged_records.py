"""A record that is missing, damaged or not finished is one line of an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import bench.commands.bench_app

RUN = '{"kind": "run", "command": "run", "configuration": {"model": "m"}, "provenance": {}}\n'
END = '{"kind": "end"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no record at"),
        ("", "is not a record of selfspec-bench"),
        (RUN + '{"kind": "sam\n' + END, "line 2 is not JSON"),
        (RUN + "[1]\n", 'line 2 is no object with a "kind"'),
        (RUN, "broke off: give its command again"),
        (RUN + END, "lacks lines or fields that its tables need"),
        (RUN.replace('"command": "run"', '"command": "sweep"') + END, "lacks lines or fields that its tables need"),
    ],
)
def test_a_missing_or_damaged_record_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    if text is not None:
        record.write_text(text, encoding="utf-8")
    for arguments in (["report", str(record)], ["report", str(record), "-o", str(tmp_path / "page.md")]):
        result = CliRunner().invoke(bench.commands.bench_app.app, arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
