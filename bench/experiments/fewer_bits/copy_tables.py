"""The table of `draft-copies`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.record import Line, matching
from bench.report.table import Table, subject


def copy_headline(lines: Sequence[Line]) -> str:
    """How near what is announced comes, in a sentence."""
    off = max(abs(line["most"] / line["announced"] - 1) for line in matching(lines, "copy"))
    return f"{subject(lines)}. The most memory while a copy is made is within {100 * off:.1f} % of what is announced."


def copy_tables(lines: Sequence[Line]) -> list[Table]:
    """Medians over repeats, by model and bits."""
    found = matching(lines, "copy")
    rows = []
    for model, bits in dict.fromkeys((line["model"], line["bits"]) for line in found):
        same = [line for line in found if (line["model"], line["bits"]) == (model, bits)]
        median = {
            name: statistics.median(line[name] for line in same)
            for name in ("weight_bytes", "announced", "held", "most", "seconds")
        }
        rows.append(
            {
                "model": model,
                "copy in": f"{bits} bits",
                "the model's weights, MB": f"{median['weight_bytes'] / 1e6:,.0f}",
                "announced, MB": f"{median['announced'] / 1e6:,.0f}",
                "held, MB": f"{median['held'] / 1e6:,.0f}",
                "at its most, MB": f"{median['most'] / 1e6:,.0f}",
                "made in": f"{median['seconds']:.1f} s",
            }
        )
    return [Table.of("draft_copies", "Copies of the weights to draft with", rows)]
