"""The tables of `selfspec-bench gpu`: texts that differ, one text's speeds, and several texts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.record import PLAIN, Line, by_value, matching
from bench.report.table import Table, counted, cross_table, names, number


def gpu_tables(lines: Sequence[Line]) -> list[Table]:
    """Make a table of each kind of measurement that there is."""
    made = {"exact": _exact, "speed": _speeds, "texts": _texts}
    return [make(lines) for kind, make in made.items() if matching(lines, kind)]


def _exact(lines: Sequence[Line]) -> Table:
    exact = matching(lines, "exact")

    def cell(what: str, dtype: str) -> str:
        found = matching(exact, "exact", dtype=dtype)
        return f"{sum(line['other'][what] for line in found)} of {sum(line['texts'] for line in found)}"

    title = f"Texts that differ, of {', '.join(by_value(exact, 'family'))}"
    return cross_table("exact", title, "", names(exact[0]["other"]), names(by_value(exact, "dtype")), cell)


def _speeds(lines: Sequence[Line]) -> Table:
    """Medians of the repeats. Those of ratios compare calls of one repeat."""
    rows = []
    for first in matching(lines, "speed", repeat=-1):
        where = {"shape": first["shape"], "beside": first["beside"]}
        bandwidth = matching(lines, "model", **where)[-1]["bandwidth"]
        plain = {line["repeat"]: line for line in matching(lines, "speed", engine=PLAIN, **where)}
        own = [line for line in matching(lines, "speed", engine=first["engine"], **where) if line["repeat"] >= 0]
        both = [(line, plain[line["repeat"]]) for line in own if line["repeat"] in plain]
        figures = {
            "tokens/s": ("{:.0f}", [line["tokens"] / line["seconds"] for line in own]),
            "× plain": ("{:.2f}", [base["seconds"] / line["seconds"] for line, base in both]),
            "of bandwidth": ("{:.0%}", [line["bytes"] / line["seconds"] / bandwidth for line in own if line["bytes"]]),
        }
        rows.append(
            {"shape": first["shape"], "engine": first["label"]}
            | {name: number(median(values) if values else None, form) for name, (form, values) in figures.items()}
            | {
                "first call, s": f"{first['seconds'] + first['first_token_seconds']:.1f}",
                "captures": str(first["captures"]),
            }
            | {
                "other texts than plain": f"{sum(line['output'] != base['output'] for line, base in both)} of {len(both)}"
            }
        )
    return Table.of("speed", "One text, tokens after the first", rows)


def _texts(lines: Sequence[Line]) -> Table:
    found = [line for line in matching(lines, "texts") if line["repeat"] >= 0]

    def cell(row: tuple[str, str], texts: int) -> str:
        runs = matching(found, "texts", shape=row[0], engine=row[1], texts=texts)
        return number(median(line["tokens"] / line["seconds"] for line in runs) if runs else None, "{:.0f}")

    rows = {(line["shape"], line["engine"]): f"{line['shape']}, {line['engine']}" for line in found}
    columns = {texts: counted(texts, "text") for texts in sorted(by_value(found, "texts"))}
    return cross_table("texts", "Tokens/s of all texts together, prompts included", "", rows, columns, cell)
