"""The tables of many texts at once and of many clients: throughput and waiting over their number."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from bench.record import Line, by_value, engine_labels, matching
from bench.report.table import UNKNOWN, Table, counted, cross_table, middle


def batch_tables(lines: Sequence[Line]) -> list[Table]:
    """Throughput while all decode, then with prompts."""
    sizes = sorted({line["texts"] for line in matching(lines, "batch")})
    engines = _engines(lines, "batch")
    plain = next(iter(engines))
    columns = {size: counted(size, "text") for size in sizes}

    def speed_of(engine: str, texts: int, when: str = "") -> float | None:
        """Tokens per second, median of the repeats. when: "decode_" for the time in which all texts decode."""
        runs = [line for line in matching(lines, "batch", engine=engine, texts=texts) if line[f"{when}seconds"]]
        return median(line[f"{when}tokens"] / line[f"{when}seconds"] for line in runs) if runs else None

    def decoding(engine: str, size: int) -> str:
        speed, base = speed_of(engine, size, "decode_"), speed_of(plain, size, "decode_")
        alone = speed_of(engine, sizes[0], "decode_")
        if speed is None or base is None or alone is None:
            return UNKNOWN
        over_plain = "" if engine == plain else f", {speed / base:.2f}× plain"
        return f"{speed:.1f} ({speed / alone:.2f}× one text{over_plain})"

    def whole(engine: str, size: int) -> str:
        speed, base = speed_of(engine, size), speed_of(plain, size)
        return UNKNOWN if not speed or not base else f"{speed:.1f} ({speed / base:.2f}×)"

    weights = {line["engine"]: line["weights"] for line in matching(lines, "engine")}

    def same(engine: str, size: int) -> str:
        first = next(name for name in engines if weights[name] == weights[engine])
        expected = matching(lines, "batch", engine=first, texts=size)[0]["output"]
        own = matching(lines, "batch", engine=engine, texts=size)
        return "equal" if all(line["output"] == expected for line in own) else "other texts"

    title = "Tokens/s of all texts together while they decode"
    beside = "Texts beside those of the first engine on the same weights"
    return [
        cross_table("decoding", title, "engine", engines, columns, decoding).known(),
        cross_table("batch", "Tokens/s with prompts included, and beside plain", "engine", engines, columns, whole),
        cross_table("outputs", beside, "engine", engines, columns, same),
    ]


def _engines(lines: Sequence[Line], kind: str) -> dict[str, str]:
    """Return the labels of engines that were measured to the end."""
    runs = by_value(matching(lines, kind), "engine")
    complete = max(map(len, runs.values()))
    return {name: label for name, label in engine_labels(lines).items() if len(runs.get(name, ())) == complete}


def load_tables(lines: Sequence[Line]) -> list[Table]:
    """Throughput and time to first token by clients."""
    engines, sizes = _engines(lines, "load"), sorted({line["clients"] for line in matching(lines, "load")})
    columns = {size: counted(size, "client") for size in sizes}

    def speed(engine: str, clients: int) -> str:
        found = matching(lines, "load", engine=engine, clients=clients)
        return middle([line["tokens"] / line["seconds"] for line in found], "{:.1f}")

    def wait(engine: str, clients: int) -> str:
        """Over all requests of all repeats."""
        found = matching(lines, "load", engine=engine, clients=clients)
        times = [time for line in found for time in line["first_seconds"] or ()]
        if not times:
            return UNKNOWN
        p95 = quantiles(times, n=20, method="inclusive")[18] if len(times) > 1 else times[0]
        return f"{median(times):.2f} / {p95:.2f}"

    load, waiting = "Tokens/s of all clients together", "Seconds to the first token, p50 / p95"
    made = (("load", load, speed), ("waiting", waiting, wait))
    return [cross_table(name, title, "engine", engines, columns, cell).known() for name, title, cell in made]
