"""The table of `row-parts`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Line, matching
from bench.report.table import Table


def row_parts_headline(lines: Sequence[Line]) -> str:
    """Where the numbers come from."""
    configuration, ways = lines[0]["configuration"], matching(lines, "way")
    peak = max(line["peak"] for line in ways)
    return (
        f"{configuration['texts']} greedy texts of {configuration['model']}, {ways[0]['positions']:,} tokens; "
        f"a row's largest number is up to {peak:.0f} times its root mean square."
    )


def row_parts_tables(lines: Sequence[Line]) -> list[Table]:
    """One row for each way to cut rows."""
    rows = tuple(
        (
            line["weights"],
            line["rows"],
            f"{line['logit']:.1e}",
            f"{line['divergence'] / line['positions']:.0e}",
            str(line["tokens"]),
            str(line["texts"]),
            f"{line['margin']:.1e}" if line["tokens"] else "\N{EN DASH}",
        )
        for line in matching(lines, "way")
    )
    columns = (
        "weights", "rows as", "largest difference of a log-probability", "KL divergence", "other tokens", "texts with one",
        "largest lead of a token that changed",
    )  # fmt: skip
    return [Table(name="row_parts", title="Rows in parts, against float64", columns=columns, rows=rows)]
