"""The tables of many texts at once and of many clients: throughput and waiting over their number."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from bench.record import Line, by_value, engine_labels, matching
from bench.report.table import UNKNOWN, Table, counted, cross_table, number


def batch_tables(lines: Sequence[Line]) -> list[Table]:
    """Throughput while all decode, then with prompts."""
    sizes, engines = _sizes(lines), _engines(lines, "batch")
    plain = next(iter(engines))
    columns = {size: counted(size, "text") for size in sizes}

    def decoding(engine: str, size: int) -> str:
        speed, base = _speed_of_texts(lines, engine, size, "decode_"), _speed_of_texts(lines, plain, size, "decode_")
        alone = _speed_of_texts(lines, engine, sizes[0], "decode_")
        if speed is None or base is None or alone is None:
            return UNKNOWN
        over_plain = "" if engine == plain else f", {speed / base:.2f}× plain"
        return f"{speed:.1f} ({speed / alone:.2f}× one text{over_plain})"

    def whole(engine: str, size: int) -> str:
        speed, base = _speed_of_texts(lines, engine, size), _speed_of_texts(lines, plain, size)
        return UNKNOWN if not speed or not base else f"{speed:.1f} ({speed / base:.2f}×)"

    title = "Tokens/s of all texts together while they decode"
    return [
        cross_table("decoding", title, "engine", engines, columns, decoding).known(),
        cross_table("batch", "Tokens/s with prompts included, and beside plain", "engine", engines, columns, whole),
        _equal_table(lines, engines, columns),
    ]


def _equal_table(lines: Sequence[Line], engines: dict[str, str], columns: dict[int, str]) -> Table:
    """Say whose texts are those of the first engine on the same weights."""
    weights = {line["engine"]: line["weights"] for line in matching(lines, "engine")}

    def cell(engine: str, size: int) -> str:
        first = next(name for name in engines if weights[name] == weights[engine])
        expected = matching(lines, "batch", engine=first, texts=size)[0]["output"]
        own = matching(lines, "batch", engine=engine, texts=size)
        return "equal" if all(line["output"] == expected for line in own) else "other texts"

    title = "Texts beside those of the first engine on the same weights"
    return cross_table("outputs", title, "engine", engines, columns, cell)


def _engines(lines: Sequence[Line], kind: str) -> dict[str, str]:
    """Return the labels of engines that were measured to the end."""
    runs = by_value(matching(lines, kind), "engine")
    complete = max(map(len, runs.values()))
    return {name: label for name, label in engine_labels(lines).items() if len(runs.get(name, ())) == complete}


def _sizes(lines: Sequence[Line]) -> list[int]:
    return sorted({line["texts"] for line in matching(lines, "batch")})


def _speed_of_texts(lines: Sequence[Line], engine: str, texts: int, when: str = "") -> float | None:
    """Tokens per second, median of the repeats. when: "decode_" for the time in which all texts decode."""
    runs = [line for line in matching(lines, "batch", engine=engine, texts=texts) if line[f"{when}seconds"]]
    return median(line[f"{when}tokens"] / line[f"{when}seconds"] for line in runs) if runs else None


def load_tables(lines: Sequence[Line]) -> list[Table]:
    """Throughput and time to first token by clients."""
    engines, columns = _engines(lines, "load"), {size: counted(size, "client") for size in _clients(lines)}

    def speed(engine: str, clients: int) -> str:
        return number(_speed_of_clients(lines, engine, clients), "{:.1f}")

    def wait(engine: str, clients: int) -> str:
        times = _first(lines, engine, clients)
        return UNKNOWN if times is None else f"{times[0]:.2f} / {times[1]:.2f}"

    title = "Seconds to the first token, p50 / p95"
    return [
        cross_table("load", "Tokens/s of all clients together", "engine", engines, columns, speed).known(),
        cross_table("waiting", title, "engine", engines, columns, wait).known(),
    ]


def _clients(lines: Sequence[Line]) -> list[int]:
    return sorted({line["clients"] for line in matching(lines, "load")})


def _speed_of_clients(lines: Sequence[Line], engine: str, clients: int) -> float | None:
    found = matching(lines, "load", engine=engine, clients=clients)
    return median(line["tokens"] / line["seconds"] for line in found) if found else None


def _first(lines: Sequence[Line], engine: str, clients: int) -> tuple[float, float] | None:
    """p50 and p95 over all requests of all repeats."""
    found = matching(lines, "load", engine=engine, clients=clients)
    times = [time for line in found for time in line["first_seconds"] or ()]
    if len(times) < 2:
        return (times[0], times[0]) if times else None
    return median(times), quantiles(times, n=20, method="inclusive")[18]
