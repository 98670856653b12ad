"""`selfspec-bench report` and `compare`: records as Markdown, and two of them side by side."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from bench.record import read_record, record_name, showing
from bench.report.compare_records import compare_records
from bench.report.markdown import markdown
from selfspec.cli.arguments import checked_output_file
from selfspec.cli.notes import one_line_errors


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
    plots: Annotated[
        bool, typer.Option("--plots", help="Draw plots into the folder plots beside --output. Needs matplotlib.")
    ] = False,
) -> None:
    """Turn records into Markdown: what came out, tables, and where the numbers come from."""
    with one_line_errors():
        if plots and output is None:
            raise ValueError("--plots needs --output, beside which the plots are written")
        if plots and find_spec("matplotlib") is None:
            raise ValueError("--plots needs matplotlib: pip install 'selfspec[plots]'")
        loaded = {record_name(path): read_record(path) for path in records}
        if len(loaded) < len(records):
            raise ValueError("two of the records have the same file name, by which plots are named: rename one")
        texts = []
        for path, (name, lines) in zip(records, loaded.items()):
            with showing(path):
                drawn = None
                if plots and output is not None:
                    from bench.report.plots import write_plots  # matplotlib is optional, and takes a second to load

                    drawn = write_plots(lines, name, output.parent)
                texts.append(markdown(lines, drawn))
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
