"""A table for people: Markdown, terminal; and how its numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from bench.record import Line
from bench.report.summary import EngineSummary, Spread

Cell = TypeVar("Cell")
Row = TypeVar("Row")
Column = TypeVar("Column")
UNKNOWN = "–"
_GAP = 2
"""Characters that a terminal shows between two columns."""
_UNLIMITED = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text cells. heat: per row and column a number in [0, 1] that colours the cell in a terminal, or None.

    prose: the cells are words, which are aligned to the left and may be broken into lines.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heat: tuple[tuple[float | None, ...], ...] | None = None
    prose: bool = False

    @classmethod
    def of(cls, name: str, title: str, rows: Iterable[Mapping[str, str]]) -> Table:
        """rows: at least one, each its cells by their columns, which are the same in all."""
        found = list(rows)
        return cls(name=name, title=title, columns=tuple(found[0]), rows=tuple(tuple(row.values()) for row in found))

    def known(self) -> Table:
        """Without the rows and columns that have nothing but dashes."""
        rows = tuple(row for row in self.rows if set(row[1:]) != {UNKNOWN})
        columns = [place for place, cells in enumerate(zip(*rows)) if place and set(cells) != {UNKNOWN}]
        return replace(self, rows=rows)._picked(columns)

    def part(self, name: str, title: str, columns: Sequence[str]) -> Table:
        """A table of the first column and the named ones."""
        return replace(self._picked([self.columns.index(column) for column in columns]), name=name, title=title)

    def _picked(self, places: Iterable[int]) -> Table:
        """The first column and those at these places."""
        places = [0, *places]

        def pick(row: tuple[Cell, ...]) -> tuple[Cell, ...]:
            return tuple(row[place] for place in places)

        heat = None if self.heat is None else tuple(map(pick, self.heat))
        return replace(self, columns=pick(self.columns), rows=tuple(map(pick, self.rows)), heat=heat)

    def markdown(self) -> str:
        """The table in Markdown, the first column left, the others right."""
        rule = " | ".join([":--", *[":--" if self.prose else "--:"] * (len(self.columns) - 1)])
        lines = [" | ".join(self.columns), rule, *(" | ".join(row) for row in self.rows)]
        return "\n".join([*([f"**{self.title}**", ""] if self.title else []), *(f"| {line} |" for line in lines)])

    def split(self, width: int) -> list[Table]:
        """Tables of at most `width` characters with the same rows, each with the first column and as many others as fit."""
        widths = [max(len(text) for text in column) + _GAP for column in zip(self.columns, *self.rows)]
        blocks: list[list[int]] = [[]]
        for index in range(1, len(self.columns)):
            used = widths[0] + sum(widths[place] for place in blocks[-1])
            if blocks[-1] and used + widths[index] > width:
                blocks.append([])
            blocks[-1].append(index)
        parts = [self._picked(places) for places in blocks]
        return [parts[0], *(replace(part, title=f"{self.title} (continued)") for part in parts[1:])]

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=escape(self.title), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        for index, column in enumerate(self.columns):
            table.add_column(escape(column), justify="left" if index == 0 else "right", overflow="fold")
        for number, row in enumerate(self.rows):
            heat = self.heat[number] if self.heat is not None else (None,) * len(row)
            table.add_row(*(_coloured(text, value) for text, value in zip(row, heat)))
        return table


def print_tables(tables: Iterable[Table], console: Console | None = None) -> None:
    """Write tables to standard output: whole into a pipe or file, in blocks of columns that fit into a terminal."""
    console = console or Console()
    for table in tables:
        if console.is_terminal:
            for block in table.split(console.width):
                console.print(block.rich())
        else:
            Console(file=console.file, width=_UNLIMITED).print(table.rich())


def _coloured(text: str, heat: float | None) -> str:
    """Text on a background from dark blue (0) over green to yellow (1)."""
    if heat is None:
        return escape(_unmarked(text))
    red, green, blue = int(40 + 200 * heat**2), int(60 + 150 * heat), int(120 * (1 - heat) + 20)
    ink = "black" if heat > 0.55 else "white"
    bold = "bold " if text.startswith("**") else ""
    return f"[{bold}{ink} on rgb({red},{green},{blue})]{escape(_unmarked(text))}[/]"


def _unmarked(text: str) -> str:
    """Without Markdown's marks for code, bold and italics, which a terminal would show as they are."""
    return text.replace("**", "").strip("*").replace("`", "")


def number(value: float | None, pattern: str, factor: float = 1) -> str:
    """value * factor in a pattern such as "{:.2f}"; a dash for None."""
    return UNKNOWN if value is None else pattern.format(value * factor)


def subject(lines: Sequence[Line]) -> str:
    """What a record measured, where: the beginning of a headline."""
    model, where = lines[0]["configuration"]["model"], lines[0]["provenance"]
    device = where["cpu"] if where["device"] == "cpu" else where["device"]
    return f"{model[0].upper()}{model[1:]} in {where['dtype']} on {device}, {counted(where['threads'], 'thread')}"


def counted(count: int, what: str) -> str:
    """A number with its noun: "1 prompt", "2 prompts"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def spread_text(spread: Spread) -> str:
    """Value (lowest to highest repeat); alone where they are the same."""
    return _with_range(spread, "{:.1f}", "")


def times(spread: Spread) -> str:
    """A ratio, and in brackets the lowest and highest repeat where they differ."""
    return _with_range(spread, "{:.2f}", "×")


def _with_range(spread: Spread, pattern: str, unit: str) -> str:
    value, low, high = (pattern.format(each) for each in (spread.value, spread.low, spread.high))
    return f"{value}{unit}" if low == high else f"{value}{unit} ({low}–{high})"


def outputs_text(row: EngineSummary) -> str:
    """How an engine's outputs compare with the reference's, and how much of them comes before a first difference."""
    if not row.num_mismatches:
        return "equal"
    found = [f"near-ties: {row.num_near_ties}"] if row.num_near_ties else []
    found += [f"DIFFERENT: {row.num_faults}"] if row.num_faults else []
    return f"{', '.join(found) or 'other weights'} ({number(row.equal_share, '{:.0f} % equal', 100)})"


def cross_table(
    name: str,
    title: str,
    corner: str,
    rows: Mapping[Row, str],
    columns: Mapping[Column, str],
    cell: Callable[[Row, Column], str],
) -> Table:
    """A cell for each pair of a row and a column, which are given with their headings. corner: what the rows are."""
    cells = tuple((heading, *(cell(row, column) for column in columns)) for row, heading in rows.items())
    return Table(name=name, title=title, columns=(corner, *columns.values()), rows=cells)


def heat_table(
    name: str,
    title: str,
    axes: Mapping[str, Sequence[str]],
    texts: Mapping[tuple[str, ...], str],
    values: Mapping[tuple[str, ...], float],
) -> Table:
    """A grid over two axes, rows first, coloured from its lowest to its highest value."""
    (down, rows), (_, columns) = axes.items()
    low, high = min(values.values()), max(values.values())
    span = (high - low) or 1.0
    heat = tuple((None, *((values[row, column] - low) / span for column in columns)) for row in rows)
    table = cross_table(name, title, down, names(rows), names(columns), lambda *place: texts[place])
    return replace(table, heat=heat)


def names(keys: Iterable[str]) -> dict[str, str]:
    """Rows or columns whose headings are their keys."""
    return {key: key for key in keys}
