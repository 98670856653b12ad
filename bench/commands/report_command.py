"""`selfspec-bench report` and `compare`: records as Markdown, and two of them side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.record import read_record, showing
from bench.report.compare_records import compare_records
from bench.report.markdown import markdown
from selfspec.cli.arguments import checked_output_file
from selfspec.cli.console import one_line_errors


def report(
    records: Annotated[list[Path], typer.Argument(help="Records that the other commands wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the Markdown to this file. Default: print it.",
            callback=checked_output_file,
        ),
    ] = None,
) -> None:
    """Turn records into Markdown: what came out, tables, and where the numbers come from."""
    with one_line_errors():
        texts = []
        for path in records:
            lines = read_record(path)
            with showing(path):
                texts.append(markdown(lines))
        if output is None:
            typer.echo("\n".join(texts), nl=False)
        else:
            output.write_text("\n".join(texts), encoding="utf-8")


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A record.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another of the same kind.")],
) -> None:
    """Two records side by side: what changed in how they were made, speeds, and whether outputs are the same."""
    with one_line_errors():
        left, right = read_record(before), read_record(after)
        with showing(before), showing(after):
            notes, table = compare_records(left, right)
    for note in notes:
        typer.echo(note)
    typer.echo(table.markdown(aligned=True))
