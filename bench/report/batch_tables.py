"""The tables of many texts at once: throughput over their number, and what a joining prompt delays."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line
from bench.report.table import UNKNOWN, Table, subject


def batch_headline(lines: Sequence[Line]) -> str:
    """What company brings."""
    sizes = _sizes(lines)
    most = sizes[-1]
    parts = []
    for name, label in lines[0]["engines"].items():
        speed, alone = _throughput(lines, name, most), _throughput(lines, name, sizes[0])
        if speed and alone:
            parts.append(f"{label} {speed:.0f} tokens/s ({speed / alone:.1f} times one text's)")
    return f"{subject(lines)}, {most} texts decoded together: {', '.join(parts)}."


def batch_tables(lines: Sequence[Line]) -> list[Table]:
    """Throughput while all decode, then with prompts; then waiting."""
    sizes, engines = _sizes(lines), lines[0]["engines"]
    columns = ("engine", *(f"{size} text{'s' if size > 1 else ''}" for size in sizes))
    plain = next(iter(engines))
    decoding, whole = [], []
    for name, label in engines.items():
        cells = []
        for size in sizes:
            speed, base, alone = (
                _decoding(lines, name, size), _decoding(lines, plain, size), _decoding(lines, name, sizes[0]),
            )  # fmt: skip
            if speed is None or base is None or alone is None:
                cells.append(UNKNOWN)
            else:
                beside = "" if name == plain else f", {speed / base:.2f}× plain"
                cells.append(f"{speed:.1f} ({speed / alone:.2f}× one text{beside})")
        if any(cell != UNKNOWN for cell in cells):
            decoding.append((label, *cells))
        totals = []
        for size in sizes:
            speed, base = _throughput(lines, name, size), _throughput(lines, plain, size)
            totals.append(UNKNOWN if not speed or not base else f"{speed:.1f} ({speed / base:.2f}×)")
        whole.append((label, *totals))
    tables = [
        Table(
            name="decoding",
            title="Tokens/s of all texts together while they decode",
            columns=columns,
            rows=tuple(decoding),
        ),
        Table(
            name="batch", title="Tokens/s with prompts included, and beside plain", columns=columns, rows=tuple(whole)
        ),
    ]
    joining = [line for line in lines if line["kind"] == "joining"]
    if joining:
        rows = tuple(
            (
                f"{line['texts']} texts, a prompt of {line['prompt_tokens']} tokens joins",
                f"{1000 * line['before_median']:.0f}",
                f"{1000 * line['reading_median']:.0f}",
                f"{1000 * line['reading_longest']:.0f}",
                str(line["steps"]),
            )
            for line in joining
        )
        tables.append(
            Table(
                name="joining",
                title="Time between tokens of texts that decode, ms",
                columns=("", "before, median", "while it is read, median", "longest", "pieces"),
                rows=rows,
            )
        )
    return tables


def _sizes(lines: Sequence[Line]) -> list[int]:
    return sorted({line["texts"] for line in lines if line["kind"] == "batch"})


def _found(lines: Sequence[Line], engine: str, texts: int) -> list[Line]:
    return [line for line in lines if line["kind"] == "batch" and (line["engine"], line["texts"]) == (engine, texts)]


def _throughput(lines: Sequence[Line], engine: str, texts: int) -> float | None:
    speeds = [line["tokens"] / line["seconds"] for line in _found(lines, engine, texts)]
    return median(speeds) if speeds else None


def _decoding(lines: Sequence[Line], engine: str, texts: int) -> float | None:
    speeds = [
        line["decode_tokens"] / line["decode_seconds"]
        for line in _found(lines, engine, texts)
        if line["decode_seconds"]
    ]
    return median(speeds) if speeds else None
