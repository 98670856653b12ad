"""The table of `roundings`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Line, matching
from bench.report.table import Table, subject


def rounding_headline(lines: Sequence[Line]) -> str:
    """What was rounded, in a sentence."""
    found = matching(lines, "rounding")
    best = max((line for line in found if line["way"].startswith("4")), key=lambda line: line["equal"])
    return f"{subject(lines)}, {found[0]['tokens']:,} tokens judged. Best in 4 bits: {best['way'].removeprefix('4 bits, ')}."


def rounding_tables(lines: Sequence[Line]) -> list[Table]:
    """The share of likeliest tokens that stay, by the way to round."""
    rows = [
        {"layers in": line["way"], "the same likeliest token": f"{line['equal'] / line['tokens']:.3f}"}
        for line in matching(lines, "rounding")
    ]
    return [Table.of("roundings", "The model's own greedy texts, read by the rounded model", rows)]
