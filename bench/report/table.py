"""A table for people, in Markdown, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

Row = TypeVar("Row")
Column = TypeVar("Column")
UNKNOWN = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text cells. prose: they are words, which are aligned to the left."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: bool = False

    @classmethod
    def of(cls, name: str, title: str, rows: Iterable[Mapping[str, str]]) -> Table:
        """rows: at least one, each its cells by their columns, which are the same in all."""
        found = list(rows)
        cells = tuple(tuple(row.values()) for row in found)
        return cls(name=name, title=title, columns=tuple(found[0]), rows=cells)

    def known(self) -> Table:
        """Without the rows and columns that have nothing but dashes."""
        rows = tuple(row for row in self.rows if set(row[1:]) != {UNKNOWN})
        kept = [place for place, cells in enumerate(zip(*rows)) if not place or set(cells) != {UNKNOWN}]
        columns, *rest = (tuple(row[place] for place in kept) for row in (self.columns, *rows))
        return replace(self, columns=columns, rows=tuple(rest))

    def markdown(self, *, aligned: bool = False) -> str:
        """Write the table in Markdown, the first column left, the others right. aligned: in a terminal, too."""
        left = [True, *[self.prose] * (len(self.columns) - 1)]
        rule = tuple(":--" if first else "--:" for first in left)
        rows = [self.columns, rule, *self.rows]
        if aligned:
            widths = [max(map(len, cells)) for cells in zip(*rows)]
            sides = [str.ljust if first else str.rjust for first in left]
            rows = [tuple(side(cell, width) for side, cell, width in zip(sides, row, widths)) for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([*([f"**{self.title}**", ""] if self.title else []), *lines])


def number(value: float | None, pattern: str, factor: float = 1) -> str:
    """value * factor in a pattern such as "{:.2f}"; a dash for None."""
    return UNKNOWN if value is None else pattern.format(value * factor)


def counted(count: int, what: str) -> str:
    """Write a number with its noun: "1 prompt", "2 prompts"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure, and the lowest and highest that a single repeat gave for it."""

    value: float
    low: float
    high: float

    def text(self, pattern: str, unit: str = "") -> str:
        """Write the value, and in brackets the lowest and highest repeat where they differ."""
        value, low, high = (pattern.format(each) for each in (self.value, self.low, self.high))
        return f"{value}{unit}" if low == high else f"{value}{unit} ({low}–{high})"


def cross_table(
    name: str,
    title: str,
    corner: str,
    rows: Mapping[Row, str],
    columns: Mapping[Column, str],
    cell: Callable[[Row, Column], str],
) -> Table:
    """Make a table with a cell for each pair of a row and a column, given with their headings. corner: what rows are."""
    cells = tuple((heading, *(cell(row, column) for column in columns)) for row, heading in rows.items())
    return Table(name=name, title=title, columns=(corner, *columns.values()), rows=cells)


def names(keys: Iterable[str]) -> dict[str, str]:
    """Rows or columns whose headings are their keys."""
    return {key: key for key in keys}
