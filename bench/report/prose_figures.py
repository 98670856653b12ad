"""Numbers in sentences, from the same tables as those that pages show.

`<!-- figure: RECORD > PART > ROW > COLUMN -->1.46<!-- /figure -->` is the first number of that cell, as its table writes it.
ROW and COLUMN are headings without Markdown's marks. Where several rows have the same, and not the same cell, ROW may be
"SECTION, ROW", or "ROW, SECOND CELL". "A ÷ B" in place of ROW or COLUMN is the ratio of two cells. A fifth part says what to
make of the number: see `FORMS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from bench.report.table import Table

FIGURE = re.compile(r"<!-- figure: (?P<place>.+?) -->(?P<text>[^<]*)<!-- /figure -->")
_NUMBER = re.compile(r"[-−+]?\d+(?:\.\d+)?")
_OVER = " ÷ "

FORMS: dict[str, Callable[[float], str]] = {
    "gain": lambda value: f"{100 * (value - 1):.0f} %",
    "loss": lambda value: f"{100 * (1 - value):.0f} %",
    "share": lambda value: f"{100 * value:.0f} %",
    "0 digits": "{:.0f}".format,
    "1 digit": "{:.1f}".format,
    "2 digits": "{:.2f}".format,
}
"""What a ratio is written as: its distance from 1, itself in percent, or rounded. Two more are taken from the cell as it is
written: "whole", and "low" and "high" of a range in brackets."""


def figure(place: str, tables: Mapping[str, Table]) -> str:
    """The text of a figure. place: PART > ROW > COLUMN, perhaps > FORM. tables: the record's, by name.

    Raises ValueError, naming the place and what there is, if the record has no such number.
    """
    part, row, column, *form = place.split(" > ")
    if part not in tables:
        raise ValueError(f'no part {part!r} for "figure: {place}": there are {", ".join(tables)}')
    how = form[0] if form else None
    table = tables[part]
    known = {_plain(cells[0]) for cells in table.rows}
    rows, columns = [row] if row in known else row.split(_OVER), column.split(_OVER)
    cells = [_cell(table, one, other, place) for one in rows for other in columns]
    if how == "whole":
        return cells[0]
    if how in ("low", "high"):
        found = re.search(r"\((.+?)–(.+?)\)", cells[0])
        if found is None:
            raise ValueError(f'"figure: {place}" needs a range, and the cell is {cells[0]!r}')
        return found[1 if how == "low" else 2]
    numbers = [_number(cell, place) for cell in cells]
    if how is None and len(numbers) == 1:
        return numbers[0]
    if how not in FORMS:
        raise ValueError(f'"figure: {place}" must end in one of {", ".join(FORMS)}')
    value = float(numbers[0]) / (float(numbers[1]) if len(numbers) > 1 else 1)
    return FORMS[how](value)


def _cell(table: Table, row: str, column: str, place: str) -> str:
    columns = [_plain(heading) for heading in table.columns]
    if column not in columns:
        raise ValueError(f'no column {column!r} for "figure: {place}": there are {", ".join(columns)}')
    found, section, known = [], "", []
    for cells in table.rows:
        heading = _plain(cells[0])
        if not any(cells[1:]):
            section = heading
            continue
        known.append(heading)
        if row in (heading, f"{section}, {heading}", f"{heading}, {_plain(cells[1])}"):
            found.append(cells[columns.index(column)])
    if len(set(found)) != 1:
        raise ValueError(f'{len(found)} rows are {row!r} for "figure: {place}": there are {"; ".join(known)}')
    return found[0]


def _number(cell: str, place: str) -> str:
    found = _NUMBER.search(cell)
    if found is None:
        raise ValueError(f'no number for "figure: {place}": the cell is {cell!r}')
    return found[0].replace("−", "-")


def _plain(heading: str) -> str:
    """Without Markdown's marks for code, bold and italics."""
    return heading.replace("*", "").replace("`", "").strip()
