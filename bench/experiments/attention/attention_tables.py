"""The table of attention over a long context, beside what memory and arithmetic allow."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line
from bench.report.table import Table, counted


def over_reading(lines: Sequence[Line], found: Sequence[Line]) -> float:
    """Median over repeats of attention's time over that of reading its keys and values at the bandwidth before it."""
    return median(line["seconds"] / line["bytes"] * _before(lines, line)["bytes_per_second"] for line in found)


def attention_headline(lines: Sequence[Line]) -> str:
    """What the fewest rows of each shape take."""
    where, context = lines[0]["provenance"], lines[0]["configuration"]["context"]
    fewest = min(line["rows"] for line in lines if line["kind"] == "attention")
    said = [
        f"{over_reading(lines, found):.2f} times ({shape}, {kv_dtype})"
        for (shape, kv_dtype, rows), found in _by_kind(lines).items()
        if rows == fewest
    ]
    return (
        f"Attention after {context} positions on {where['cpu']}, {counted(where['threads'], 'thread')}, kernels for "
        f"{where['kernels']}: {counted(fewest, 'row')} take{'s' if fewest == 1 else ''} {', '.join(said)} as long as "
        "reading the keys and values."
    )


def attention_tables(lines: Sequence[Line]) -> list[Table]:
    """A row for each shape, dtype and number of rows."""
    rows = []
    for (shape, kv_dtype, number), found in _by_kind(lines).items():
        reading = [line["bytes"] / _before(lines, line)["bytes_per_second"] for line in found]
        computing = [line["products"] / _before(lines, line)["products_per_second"] for line in found]
        rows.append(
            (
                shape,
                kv_dtype,
                str(number),
                f"{1000 * median(line['seconds'] for line in found):.2f}",
                f"{1000 * median(reading):.2f}",
                f"{over_reading(lines, found):.2f}",
                f"{1000 * median(computing):.2f}",
            )
        )
    context = lines[0]["configuration"]["context"]
    return [
        Table(
            name="attention",
            title=f"A layer's attention after {context} positions; reading its keys and values at the measured bandwidth; "
            "its multiplications at the speed of PyTorch's products of matrices that are in a cache",
            columns=("heads of", "keys and values", "rows", "ms", "reading, ms", "of reading", "arithmetic, ms"),
            rows=tuple(rows),
        )
    ]


def _by_kind(lines: Sequence[Line]) -> dict[tuple[str, str, int], list[Line]]:
    found: dict[tuple[str, str, int], list[Line]] = {}
    for line in lines:
        if line["kind"] == "attention":
            found.setdefault((line["shape"], line["kv_dtype"], line["rows"]), []).append(line)
    return found


def _before(lines: Sequence[Line], line: Line) -> Line:
    """What the machine gave when this was measured."""
    return next(other for other in lines[: lines.index(line)][::-1] if other["kind"] == "machine")
