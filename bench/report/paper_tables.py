"""The table of a paper's claims: theirs beside ours, a column for each model, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from bench.papers.preset import Preset
from bench.papers.verdicts import finding
from bench.record import Line, matching
from bench.report.table import Table, counted


def paper_tables(lines: Sequence[Line]) -> list[Table]:
    """Judge every claim by one record, or by several of one paper that follow each other."""
    starts = [place for place, line in enumerate(lines) if line["kind"] == "run"]
    records = [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)])]
    paper = lines[0]["configuration"]["paper"]
    preset = Preset.load(paper, lines[0]["configuration"]["tables"])
    names = [_name(record) for record in records]
    rows = []
    for claim in preset.claims:
        found = [finding(claim, preset, record) for record in records]
        where = claim["table"] if not claim["table"].isdigit() else f"Table {claim['table']}"
        verdicts = list(dict.fromkeys(one.verdict for one in found))
        verdict = verdicts[0]
        if len(verdicts) > 1:
            verdict = "; ".join(f"{name}: {one.verdict}" for name, one in zip(names, found))
        cells = {"claim": f"{where}: {claim['claim']}", "theirs": claim["theirs"]}
        cells |= {name: one.ours for name, one in zip(names, found)}
        looping = [one.looping for one in found]
        rows.append(
            {**cells, "on looping texts": "; ".join(looping) if set(looping) != {"–"} else "–", "verdict": verdict}
        )
    made = Table.of("claims", _title(preset, records), rows)
    return [Table(name=made.name, title=made.title, columns=made.columns, rows=made.rows, prose=True)]


def _name(record: Sequence[Line]) -> str:
    return str(record[0]["configuration"]["model"]).removeprefix("the ").removesuffix(" model")


def _title(preset: Preset, records: Sequence[Sequence[Line]]) -> str:
    """Say what was run, and what was left out."""
    parts = []
    for record in records:
        asked = record[0]["configuration"]
        tasks = list(dict.fromkeys(line["task"] for line in matching(record, "sample")))
        left_out = [*asked["missing"], *(f"{count} too long of {task}" for task, count in asked["too_long"].items())]
        parts.append(
            f"{_name(record)}, {counted(len(asked['prompts']), 'prompt')} of {counted(len(tasks), 'task')} "
            f"({', '.join(tasks)}; {asked['source']}), up to {asked['max_new_tokens']} tokens"
            f"{', left out: ' + ', '.join(left_out) if left_out else ''}"
        )
    return (
        f"{preset.title}: {'; '.join(parts)}; EOS on. 95 % intervals over prompts, paired, of n texts that do not loop; "
        "they leave out the drift between runs"
    )
