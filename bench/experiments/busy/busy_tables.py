"""The tables of a busy machine: what of its quiet speed each engine keeps, and the processor time that a token costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line
from bench.report.table import UNKNOWN, Table, subject


def busy_headline(lines: Sequence[Line]) -> str:
    """What the engines keep of their quiet speed."""
    most = max(busy_levels(lines))
    shares = {label: busy_share(lines, name, most) for name, label in lines[0]["engines"].items()}
    kept = [f"{label} {share:.2f}" for label, share in shares.items() if share is not None]
    return (
        f"{subject(lines)}. Beside {most} busy "
        f"processes per core, each engine keeps this share of its quiet speed (a fair share is {1 / (most + 1):.2f}): "
        f"{', '.join(kept)}."
    )


def busy_tables(lines: Sequence[Line]) -> list[Table]:
    """Speeds with shares, then processor time."""
    levels = busy_levels(lines)
    columns = ("engine", *("quiet" if level == 0 else f"{level} per core" for level in levels))
    speeds, costs = [], []
    for name, label in lines[0]["engines"].items():
        cells = []
        for level in levels:
            speed, share = _speed(lines, name, level), busy_share(lines, name, level)
            kept = f" ({share:.2f})" if level and share is not None else ""
            cells.append(UNKNOWN if speed is None else f"{speed:.1f}{kept}")
        speeds.append((label, *cells))
        costs.append((label, *(_cost(lines, name, level) for level in levels)))
    fair = ("fair share", *("" if level == 0 else f"({1 / (level + 1):.2f})" for level in levels))
    return [
        Table(
            name="speed",
            title="tokens/s beside busy processes, and in brackets the share of the quiet speed",
            columns=columns,
            rows=(*speeds, fair),
        ),
        Table(name="cost", title="Processor time per token, ms, all threads", columns=columns, rows=tuple(costs)),
    ]


def busy_levels(lines: Sequence[Line]) -> list[int]:
    """Busy processes per core, 0 first."""
    return sorted({line["busy"] for line in lines if line["kind"] == "cell"})


def _cells(lines: Sequence[Line], engine: str, level: int) -> list[Line]:
    return [line for line in lines if line["kind"] == "cell" and (line["engine"], line["busy"]) == (engine, level)]


def _speed(lines: Sequence[Line], engine: str, level: int) -> float | None:
    found = [line["tokens"] / line["seconds"] for line in _cells(lines, engine, level)]
    return median(found) if found else None


def busy_share(lines: Sequence[Line], engine: str, level: int) -> float | None:
    """What an engine keeps of its quiet speed; None if that was not measured."""
    quiet, speed = _speed(lines, engine, 0), _speed(lines, engine, level)
    return speed / quiet if quiet and speed is not None else None


def _cost(lines: Sequence[Line], engine: str, level: int) -> str:
    found = [1000 * line["cpu_seconds"] / line["tokens"] for line in _cells(lines, engine, level) if line["tokens"]]
    return f"{median(found):.2f}" if found else UNKNOWN
