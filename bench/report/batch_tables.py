"""The tables of many texts at once: throughput over their number."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table, counted, cross_table


def batch_tables(lines: Sequence[Line]) -> list[Table]:
    """Throughput while all decode, then with prompts."""
    sizes, engines = _sizes(lines), lines[0]["engines"]
    plain = next(iter(engines))
    columns = {size: counted(size, "text") for size in sizes}

    def decoding(engine: str, size: int) -> str:
        speed, base = _speed(lines, engine, size, "decode_"), _speed(lines, plain, size, "decode_")
        alone = _speed(lines, engine, sizes[0], "decode_")
        if speed is None or base is None or alone is None:
            return UNKNOWN
        over_plain = "" if engine == plain else f", {speed / base:.2f}× plain"
        return f"{speed:.1f} ({speed / alone:.2f}× one text{over_plain})"

    def whole(engine: str, size: int) -> str:
        speed, base = _speed(lines, engine, size), _speed(lines, plain, size)
        return UNKNOWN if not speed or not base else f"{speed:.1f} ({speed / base:.2f}×)"

    title = "Tokens/s of all texts together while they decode"
    return [
        cross_table("decoding", title, "engine", engines, columns, decoding).known(),
        cross_table("batch", "Tokens/s with prompts included, and beside plain", "engine", engines, columns, whole),
    ]


def _sizes(lines: Sequence[Line]) -> list[int]:
    return sorted({line["texts"] for line in matching(lines, "batch")})


def _speed(lines: Sequence[Line], engine: str, texts: int, when: str = "") -> float | None:
    """Tokens per second, median of the repeats. when: "decode_" for the time in which all texts decode."""
    runs = [line for line in matching(lines, "batch", engine=engine, texts=texts) if line[f"{when}seconds"]]
    return median(line[f"{when}tokens"] / line[f"{when}seconds"] for line in runs) if runs else None
