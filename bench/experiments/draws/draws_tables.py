"""The table of `draws`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import Line, matching
from bench.report.table import Table, counted


def draws_headline(lines: Sequence[Line]) -> str:
    """The least and the most that the kernels gain."""
    where = lines[0]["provenance"]
    gains = [operators / kernels for operators, kernels in _medians(lines).values()]
    return (
        f"From a row's logits to a token on {where['cpu']}, {counted(where['threads'], 'thread')}, kernels for "
        f"{where['kernels']}: {min(gains):.1f} to {max(gains):.1f} times as fast as by PyTorch's operators."
    )


def draws_tables(lines: Sequence[Line]) -> list[Table]:
    """A row for each vocabulary and setting."""
    rows = tuple(
        (f"{size:,}", setting, f"{1e6 * operators:.0f}", f"{1e6 * kernels:.0f}", f"{operators / kernels:.1f}")
        for (size, setting), (operators, kernels) in _medians(lines).items()
    )
    columns = ("vocabulary", "setting", "operators, µs", "kernels, µs", "ratio")
    return [Table(name="draws", title="From one row's logits to a token, medians", columns=columns, rows=rows)]


def _medians(lines: Sequence[Line]) -> dict[tuple[int, str], tuple[float, float]]:
    """Seconds by operators and by kernels, by vocabulary and setting."""
    found = {
        (line["vocabulary"], line["setting"], line["way"]): median(line["seconds"]) for line in matching(lines, "draw")
    }
    return {
        (size, setting): (seconds, found[size, setting, "kernels"])
        for (size, setting, way), seconds in found.items()
        if way == "operators"
    }
