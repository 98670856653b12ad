"""The tables of `selfspec-bench load` and `kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.record import Line, by_value, matching
from bench.report.table import Table, cross_table, number


def load_tables(lines: Sequence[Line]) -> list[Table]:
    """Medians of the repeats; the share is the median of their shares."""
    rows = []
    for name, own in _by_model(lines).items():

        def of(value: Callable[[Line], float], own: Sequence[Line] = own) -> float:
            return median(map(value, own))

        known = all(line["peak"] and line["held"] for line in own)  # Linux tells
        rows.append(
            {
                "checkpoint": name,
                "GB": f"{own[0]['bytes'] / 1e9:.2f}",
                "load, s": f"{of(lambda line: line['seconds']):.2f}",
                "load, GB/s": f"{of(lambda line: line['bytes'] / line['seconds'] / 1e9):.2f}",
                "plain read, GB/s": f"{of(lambda line: line['read_by_1'] / 1e9):.2f}",
                "by two readers": f"{of(lambda line: line['read_by_2'] / 1e9):.2f}",
                "share of a plain read": f"{of(_share):.2f}",
                "peak memory / file": number(
                    of(lambda line: line["peak"] / line["bytes"]) if known else None, "{:.2f}"
                ),
                "memory without files / file": number(
                    of(lambda line: line["held"] / line["bytes"]) if known else None, "{:.2f}"
                ),
            }
        )
    tables = [Table.of("load", "Loading, medians; memory is that of the whole process", rows)]
    starts = by_value(matching(lines, "start"), "what")
    if starts:
        rows = [
            {
                "": what,
                "seconds": f"{median(line['seconds'] for line in own):.2f}",
                "fastest": f"{min(line['seconds'] for line in own):.2f}",
                "slowest": f"{max(line['seconds'] for line in own):.2f}",
                "seconds of processors": f"{median(line['processor_seconds'] for line in own):.2f}",
            }
            for what, own in starts.items()
        ]
        tables.append(Table.of("starts", "From the start of a process to its end or its prompt: medians", rows))
    return tables


def _by_model(lines: Sequence[Line]) -> dict[str, list[Line]]:
    return by_value(matching(lines, "load"), "model")


def _share(line: Line) -> float:
    return float(line["bytes"] / line["seconds"] / line["read_by_1"])


def kernels_tables(lines: Sequence[Line]) -> list[Table]:
    """One table for each kind of weights: variants by rows."""
    variants = {name: name for name in lines[0]["configuration"]["variants"]}

    def table(kind: str, own: Sequence[Line]) -> Table:
        def cell(variant: str, rows: int) -> str:
            found = matching(own, "product", variant=variant, rows=rows)
            seconds = median(line["seconds"] for line in found)
            return f"{found[0]['bytes'] / seconds / 1e9:.1f} ({1e6 * seconds:.0f})"

        columns = {rows: f"{rows} rows" if rows > 1 else "1 row" for rows in by_value(own, "rows")}
        title = f"{kind}: GB/s of weights, and microseconds of a product"
        return cross_table(f"products {kind}", title, "variant", variants, columns, cell)

    return [table(kind, own) for kind, own in by_value(matching(lines, "product"), "weights").items()]
