"""`selfspec-bench report`: records as Markdown or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.record import read_record, record_name, showing
from bench.report.markdown import fill_markers, markdown
from selfspec.cli.arguments import checked_output_file
from selfspec.cli.notes import one_line_errors


def report(
    records: Annotated[list[Path], typer.Argument(help="Records that run, sweep or peers wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write: .html (one record) or Markdown, with plots next to it. Default: print Markdown.",
            callback=checked_output_file,
        ),
    ] = None,
    into: Annotated[
        list[Path] | None,
        typer.Option(
            help="Fill the <!-- report:NAME --> markers of a document; NAME is a record's file name without its ending."
        ),
    ] = None,
) -> None:
    """Turn records into one HTML page with plots, or into Markdown: tables, and plots in a folder next to it."""
    with one_line_errors():
        loaded = {record_name(path): read_record(path) for path in records}
        if len(loaded) < len(records):
            raise ValueError("two of the records have the same file name, by which documents refer to them: rename one")
        for document in into or []:
            if not document.is_file():
                raise ValueError(f"there is no document at {document}: --into fills places in a file that exists")
        for path, lines in zip(records, loaded.values()):
            with showing(path):
                markdown(lines)
        if output is not None and output.suffix.lower() in (".html", ".htm"):
            if len(loaded) != 1:
                raise ValueError(f"an HTML page shows one record, got {len(loaded)}")
            from bench.report.page import page  # matplotlib takes a second to load

            with showing(records[0]):
                output.write_text(page(next(iter(loaded.values()))), encoding="utf-8")
        elif output is not None:
            from bench.report.figures import write_plots

            texts = [markdown(lines, write_plots(lines, name, output.parent)) for name, lines in loaded.items()]
            output.write_text("\n".join(texts), encoding="utf-8")
        elif not into:
            typer.echo("\n".join(map(markdown, loaded.values())), nl=False)
        for document in into or []:
            from bench.report.figures import write_plots

            written = document.read_text(encoding="utf-8")
            whole = {name: lines for name, lines in loaded.items() if f"<!-- report:{name} -->" in written}
            plots = {name: write_plots(lines, name, document.parent) for name, lines in whole.items()}
            document.write_text(fill_markers(written, loaded, plots), encoding="utf-8")
