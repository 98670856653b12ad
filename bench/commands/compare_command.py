"""`selfspec-bench compare`: two records side by side."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from bench.commands.bench_options import CompareCommand
from bench.record import Line, differences, matching, read_record, showing
from bench.report.summary import Samples
from bench.report.table import Table
from selfspec.cli.console import one_line_errors

_WHERE = ("cpu", "device", "threads", "dtype", "torch", "transformers", "commit")


def compare(options: CompareCommand) -> None:
    with one_line_errors():
        left, right = read_record(options.before), read_record(options.after)
        with showing(options.before), showing(options.after):
            notes, table = compare_records(left, right)
    for note in notes:
        typer.echo(note)
    typer.echo(table.markdown(aligned=True))


def compare_records(before: Sequence[Line], after: Sequence[Line]) -> tuple[list[str], Table]:
    """Return what differs in how the two were made, and a row per engine in both. Raises ValueError if there is none."""
    notes = [f"{name}: {old} -> {new}" for name, old, new in differences(before[0], after[0], _WHERE)]
    left, right = Samples(before), Samples(after)
    rows = []
    for name in [name for name in left.engines if name in right.engines]:
        old, new = left.speed(name), right.speed(name)
        rows.append(
            {
                "engine": right.engines[name],
                "tokens/s A": old.text("{:.1f}"),
                "tokens/s B": new.text("{:.1f}"),
                "B over A": f"{new.value / old.value:.2f}×",
                "outputs of B": _outputs(left, right, name),
            }
        )
    if not rows:
        raise ValueError("the two records have no engine in common")
    return notes, Table.of("compare", "B against A", rows)


def _outputs(left: Samples, right: Samples, engine: str) -> str:
    """Say whether an engine wrote the same tokens for the prompts that both have."""
    own = (matching(samples.outputs, "output", engine=engine) for samples in (left, right))
    old, new = ({line["prompt"]: line["output"] for line in lines} for lines in own)
    shared = old.keys() & new.keys()
    changed = sum(old[prompt] != new[prompt] for prompt in shared)
    if not shared:
        return "no prompt in common"
    return f"{changed} of {len(shared)} differ" if changed else "equal"
