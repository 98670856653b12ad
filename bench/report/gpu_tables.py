"""The tables of `selfspec-bench gpu`: texts that differ, and speeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import PLAIN, Line, by_value, matching
from bench.report.table import Table, counted, number


def gpu_tables(lines: Sequence[Line]) -> list[Table]:
    """Make a table of each kind of measurement that there is."""
    made = (matching(lines, "exact"), _exact), (matching(lines, "speed", repeat=-1), _speeds)
    return [make(lines) for measured, make in made if measured]


def _exact(lines: Sequence[Line]) -> Table:
    exact = matching(lines, "exact")
    rows = [{"": what} for what in exact[0]["other"]]
    for row in rows:
        for dtype, found in by_value(exact, "dtype").items():
            row[dtype] = f"{sum(line['other'][row['']] for line in found)} of {sum(line['texts'] for line in found)}"
    return Table.of("exact", f"Texts that differ, of {', '.join(by_value(exact, 'family'))}", rows)


def _speeds(lines: Sequence[Line]) -> Table:
    """Medians of the repeats. Those of ratios compare calls of one repeat."""
    rows = []
    for first in matching(lines, "speed", repeat=-1):
        where = {"shape": first["shape"], "beside": first["beside"]}
        bandwidth = matching(lines, "model", **where)[-1]["bandwidth"]
        plain = {line["repeat"]: line for line in matching(lines, "speed", engine=PLAIN, **where)}
        where["engine"] = first["engine"]
        own = [line for line in matching(lines, "speed", **where) if line["repeat"] >= 0]
        both = [(line, plain[line["repeat"]]) for line in own if line["repeat"] in plain]
        figures = {
            "tokens/s": [line["tokens"] / line["seconds"] for line in own],
            "× plain": [base["seconds"] / line["seconds"] for line, base in both],
            "% of bandwidth": [100 * line["bytes"] / line["seconds"] / bandwidth for line in own if line["bytes"]],
        }
        for texts in sorted(by_value(matching(lines, "texts"), "texts")):
            runs = [line for line in matching(lines, "texts", texts=texts, **where) if line["repeat"] >= 0]
            figures[counted(texts, "text")] = [line["tokens"] / line["seconds"] for line in runs]
        shown = {name: number(median(found) if found else None, "{:.4g}") for name, found in figures.items()}
        shown |= {
            "first call, s": f"{first['seconds'] + first['first_token_seconds']:.1f}",
            "captures": str(first["captures"]),
        }
        shown["other texts"] = f"{sum(line['output'] != base['output'] for line, base in both)} of {len(both)}"
        rows.append({"shape": first["shape"], "engine": first["label"], **shown})
    title = "Tokens/s after the first, of one text; of several, with prompts; texts other than plain decoding's"
    return Table.of("speed", title, rows)
