"""The tables of serving: throughput and waiting over the number of clients, and what the server adds for one client."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from bench.machine.serving_load import overhead
from bench.record import Line
from bench.report.table import UNKNOWN, Table, subject


def serving_headline(lines: Sequence[Line]) -> str:
    """What the server adds, and its throughput with the most clients."""
    parts = []
    single = [line for line in lines if line["kind"] == "overhead"]
    if single:
        parts.append(
            f"for one client the server adds {1e3 * overhead(single, 'first_seconds'):.1f} ms to the first token and "
            f"{1e3 * overhead(single, 'seconds'):.1f} ms to the whole answer"
        )
    for name, label in lines[0]["engines"].items():
        speed = _speed(lines, name, max(_clients(lines), default=0))
        if speed:
            parts.append(f"{label} {speed:.1f} tokens/s")
    most = f", {max(_clients(lines))} clients" if _clients(lines) else ""
    return f"{subject(lines)}{most}: {', '.join(parts)}."


def serving_tables(lines: Sequence[Line]) -> list[Table]:
    """Throughput and time to first token by clients; then the overhead."""
    tables = []
    sizes, engines = _clients(lines), lines[0]["engines"]
    if sizes:
        columns = ("engine", *(f"{size} client{'s' if size > 1 else ''}" for size in sizes))
        speeds, waits = [], []
        for name, label in engines.items():
            found = [_speed(lines, name, size) for size in sizes]
            if any(found):
                speeds.append((label, *(UNKNOWN if not speed else f"{speed:.1f}" for speed in found)))
            times = [_first(lines, name, size) for size in sizes]
            if any(times):
                waits.append((label, *(UNKNOWN if not t else f"{t[0]:.2f} / {t[1]:.2f}" for t in times)))
        tables.append(
            Table(name="serving", title="Tokens/s of all clients together", columns=columns, rows=tuple(speeds))
        )
        tables.append(
            Table(name="waiting", title="Seconds to the first token, p50 / p95", columns=columns, rows=tuple(waits))
        )
    single = [line for line in lines if line["kind"] == "overhead"]
    if single:
        rows = tuple(
            (
                label,
                f"{1e3 * median(line[f'own_{what}'] for line in single):.1f}",
                f"{1e3 * median(line[f'served_{what}'] for line in single):.1f}",
                f"{1e3 * overhead(single, what):.1f}",
            )
            for what, label in (("first_seconds", "first token"), ("seconds", "whole answer"))
        )
        columns = ("", "engine alone", "server", "added")
        tables.append(Table(name="overhead", title="One client, ms", columns=columns, rows=rows))
    return tables


def _clients(lines: Sequence[Line]) -> list[int]:
    return sorted({line["clients"] for line in lines if line["kind"] == "serving"})


def _found(lines: Sequence[Line], engine: str, clients: int) -> list[Line]:
    return [
        line for line in lines if line["kind"] == "serving" and (line["engine"], line["clients"]) == (engine, clients)
    ]


def _speed(lines: Sequence[Line], engine: str, clients: int) -> float | None:
    speeds = [line["tokens"] / line["seconds"] for line in _found(lines, engine, clients)]
    return median(speeds) if speeds else None


def _first(lines: Sequence[Line], engine: str, clients: int) -> tuple[float, float] | None:
    """p50 and p95 over all requests of all repeats."""
    times = [time for line in _found(lines, engine, clients) for time in line["first_seconds"] or ()]
    if len(times) < 2:
        return (times[0], times[0]) if times else None
    cuts = quantiles(times, n=20, method="inclusive")
    return median(times), cuts[18]
