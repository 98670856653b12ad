"""Tables for people: whole in a pipe, in blocks of columns in a narrow terminal, numbers with their nouns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.report.table import Table, counted, print_tables

WIDE = Table(
    name="wide",
    title="Speed on a model with [brackets] in its name",
    columns=("engine", *(f"column number {i}" for i in range(12))),
    rows=tuple((f"*engine {name}*", *(f"{name}{i}: 1234.5 (1200.0–1300.0)" for i in range(12))) for name in "ab"),
)
CELLS = [f"{name}{i}: 1234.5 (1200.0–1300.0)" for name in "ab" for i in range(12)]


def printed(*, width: int, terminal: bool) -> str:
    stream = io.StringIO()
    print_tables([WIDE], Console(file=stream, width=width, force_terminal=terminal, color_system=None))
    return stream.getvalue()


def test_a_pipe_gets_the_whole_table() -> None:
    lines = printed(width=80, terminal=False).splitlines()
    assert "Speed on a model with [brackets] in its name" in lines[0]
    rows = [line for line in lines if line.strip().startswith(("engine a", "engine b"))]
    assert len(rows) == 2
    assert all(cell in "".join(rows) for cell in CELLS)


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_gets_blocks_of_columns_that_fit(width: int) -> None:
    text = printed(width=width, terminal=True)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert all(cell in text for cell in CELLS)  # no number is broken
    blocks = sum(line.strip().startswith("engine a ") for line in lines)
    assert blocks == (6 if width == 80 else 3)  # a name takes 12, a column 28 or 29: two fit into 80, four into 140
    assert text.count("(continued)") == blocks - 1


def test_a_table_that_fits_stays_whole() -> None:
    assert WIDE.split(10_000) == [WIDE]


def test_numbers_agree_with_their_nouns() -> None:
    assert [counted(number, "prompt") for number in (0, 1, 2)] == ["0 prompts", "1 prompt", "2 prompts"]
