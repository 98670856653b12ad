"""The table of a paper's claims: theirs beside ours, a column for each model, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from bench.papers.preset import load_preset
from bench.papers.verdicts import finding
from bench.record import Line, matching
from bench.report.table import UNKNOWN, Table, counted


def paper_tables(lines: Sequence[Line]) -> list[Table]:
    """Judge every claim by one record, or by several of one paper that follow each other."""
    starts = [place for place, line in enumerate(lines) if line["kind"] == "run"]
    records = [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)])]
    asked = lines[0]["configuration"]
    preset = load_preset(asked["paper"], asked["tables"])
    names = [record[0]["configuration"]["model"].removeprefix("the ").removesuffix(" model") for record in records]
    rows = []
    for claim in preset["claims"]:
        found = {name: finding(claim, preset, record) for name, record in zip(names, records)}
        verdicts = list(dict.fromkeys(one.verdict for one in found.values()))
        looping = [one.looping for one in found.values() if one.looping != UNKNOWN]
        rows.append({
            "claim": f"{_place(claim['table'])}: {claim['claim']}",
            "theirs": claim["theirs"],
            **{name: one.ours for name, one in found.items()},
            "on looping texts": "; ".join(looping) or UNKNOWN,
            "verdict": "; ".join(f"{name}: {one.verdict}" for name, one in found.items()) if verdicts[1:] else verdicts[0],
        })  # fmt: skip
    title = f"{preset['title']}: {'; '.join(map(_described, names, records))}; EOS on"
    rules = "95 % intervals over prompts, paired, of n texts that do not loop; they leave out the drift between runs."
    return [replace(Table.of("claims", " ".join([f"{title}. {rules}", *preset["notes"]]), rows), prose=True)]


def _place(table: str) -> str:
    """Name a table, section, figure, algorithm or equation as the paper does."""
    kind = "".join(takewhile(str.isalpha, table))
    return f"{kind.capitalize()}. {table[len(kind) :]}" if kind else f"{'Section' if '.' in table else 'Table'} {table}"


def _described(name: str, record: Sequence[Line]) -> str:
    """Say on what a record was made, and what was left out."""
    asked = record[0]["configuration"]
    tasks = list(dict.fromkeys(line["task"] for line in matching(record, "sample")))
    left_out = [
        *asked["missing"],
        *(f"{count} too long of {task}" for task, count in asked["too_long"].items() if count),
    ]
    without = f", without {', '.join(left_out)}" if left_out else ""
    return (
        f"{name}{', a quick trial' if asked['quick'] else ''}, {counted(len(asked['prompts']), 'prompt')} of "
        f"{', '.join(tasks)} ({asked['source']}), at most {asked['max_new_tokens']} tokens{without}"
    )
