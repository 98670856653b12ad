"""Plots of tables, as SVG for an HTML page. They need matplotlib; without it pages have their tables alone."""

from __future__ import annotations

import re
from importlib.util import find_spec
from io import StringIO

from bench.report.table import Table

_NUMBER = re.compile(r"[*`]*(-?\d+(?:\.\d+)?)")


def plot(table: Table) -> str | None:
    """Draw one column as bars, or a line for each row where the columns are numbers of something; None for other tables."""
    columns = [_number(heading) for heading in table.columns[1:]]
    drawn = table.plotted in table.columns or (len(columns) > 1 and None not in columns)
    if not drawn or find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure  # an optional package, which takes long to import

    figure = Figure(figsize=(8, 4 if table.plotted is None else 0.6 + 0.3 * len(table.rows)), layout="constrained")
    axes = figure.add_subplot()
    if table.plotted is not None:
        place = table.columns.index(table.plotted)
        found = [(row[0], value) for row in table.rows if (value := _number(row[place])) is not None]
        axes.barh([label for label, _ in found], [value for _, value in found], color="tab:blue")
        axes.invert_yaxis()
        axes.set_xlabel(table.plotted)
    else:
        for row in table.rows:
            points = [(x, y) for x, cell in zip(columns, row[1:]) if (y := _number(cell)) is not None]
            axes.plot([x or 0.0 for x, _ in points], [y for _, y in points], marker="o", label=row[0])
        axes.set_xlabel(" ".join(table.columns[-1].split()[1:]))
        axes.legend(fontsize="small")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawing = StringIO()
    figure.savefig(drawing, format="svg")
    return drawing.getvalue().partition("<svg")[2].join(("<svg", ""))


def _number(cell: str) -> float | None:
    """Return the number that a cell begins with."""
    match = _NUMBER.match(cell)
    return None if match is None else float(match[1])
