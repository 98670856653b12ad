"""The table of loading: speed beside plain reads, and memory beside the file's size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.record import Line, matching
from bench.report.table import Table


def loading_headline(lines: Sequence[Line]) -> str:
    """The share of a plain read's speed at which each file loads."""
    found = [f"{name} at {_of(lines, name, _share):.2f}" for name in _formats(lines)]
    return f"Loading {lines[0]['configuration']['model']}, as a share of the speed of a plain read: {', '.join(found)}."


def loading_tables(lines: Sequence[Line]) -> list[Table]:
    """Medians of the repeats; the share is the median of their shares."""
    rows = tuple(
        (
            name,
            f"{_of(lines, name, lambda line: line['bytes'] / 1e9):.1f}",
            f"{_of(lines, name, lambda line: line['read_by_1'] / 1e9):.2f}",
            f"{_of(lines, name, lambda line: line['read_by_2'] / 1e9):.2f}",
            f"{_of(lines, name, lambda line: line['bytes'] / line['seconds'] / 1e9):.2f}",
            f"{_of(lines, name, _share):.2f}",
            f"{_of(lines, name, lambda line: line['peak'] / line['bytes']):.2f}",
            f"{_of(lines, name, lambda line: line['held'] / line['bytes']):.2f}",
        )
        for name in _formats(lines)
    )
    columns = (
        "file", "GB", "plain read, GB/s", "by two readers", "load, GB/s", "share of a plain read", "peak memory / file",
        "memory without files / file",
    )  # fmt: skip
    title = "Loading from the disk, medians; memory is that of the whole process"
    return [Table(name="loading", title=title, columns=columns, rows=rows)]


def _formats(lines: Sequence[Line]) -> list[str]:
    return [*dict.fromkeys(line["format"] for line in matching(lines, "load"))]


def _share(line: Line) -> float:
    return float(line["bytes"] / line["seconds"] / line["read_by_1"])


def _of(lines: Sequence[Line], name: str, value: Callable[[Line], float]) -> float:
    return median(value(line) for line in matching(lines, "load", format=name))
