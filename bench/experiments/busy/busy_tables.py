"""The tables of a busy machine: what of its quiet speed each engine keeps, and the processor time that a token costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table, cross_table, number, subject


def busy_headline(lines: Sequence[Line]) -> str:
    """What the engines keep of their quiet speed."""
    most = max(busy_levels(lines))
    shares = {label: busy_share(lines, name, most) for name, label in lines[0]["engines"].items()}
    kept = [f"{label} {share:.2f}" for label, share in shares.items() if share is not None]
    return (
        f"{subject(lines)}. Beside {most} busy processes per core, each engine keeps this share of its quiet speed "
        f"(a fair share is {1 / (most + 1):.2f}): {', '.join(kept)}."
    )


def busy_tables(lines: Sequence[Line]) -> list[Table]:
    """Speeds with shares, then processor time."""
    columns = {level: f"{level} per core" if level else "quiet" for level in busy_levels(lines)}
    engines = lines[0]["engines"]

    def speed(engine: str, level: int) -> str:
        share = busy_share(lines, engine, level) if level else None
        return number(_speed(lines, engine, level), "{:.1f}") + ("" if share is None else f" ({share:.2f})")

    title = "tokens/s beside busy processes, and in brackets the share of the quiet speed"
    speeds = cross_table("speed", title, "engine", engines, columns, speed)
    fair = ("fair share", *(f"({1 / (level + 1):.2f})" if level else "" for level in columns))
    title = "Processor time per token, ms, all threads"
    costs = cross_table("cost", title, "engine", engines, columns, lambda *cell: _cost(lines, *cell))
    return [replace(speeds, rows=(*speeds.rows, fair)), costs]


def busy_levels(lines: Sequence[Line]) -> list[int]:
    """Busy processes per core, 0 first."""
    return sorted({line["busy"] for line in matching(lines, "cell")})


def _speed(lines: Sequence[Line], engine: str, level: int) -> float | None:
    found = [line["tokens"] / line["seconds"] for line in matching(lines, "cell", engine=engine, busy=level)]
    return median(found) if found else None


def busy_share(lines: Sequence[Line], engine: str, level: int) -> float | None:
    """What an engine keeps of its quiet speed; None if that was not measured."""
    quiet, speed = _speed(lines, engine, 0), _speed(lines, engine, level)
    return speed / quiet if quiet and speed is not None else None


def _cost(lines: Sequence[Line], engine: str, level: int) -> str:
    found = [
        1000 * line["cpu_seconds"] / line["tokens"]
        for line in matching(lines, "cell", engine=engine, busy=level)
        if line["tokens"]
    ]
    return f"{median(found):.2f}" if found else UNKNOWN
