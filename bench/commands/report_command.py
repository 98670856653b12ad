"""`selfspec-bench report` and `compare`: records as pages, tables of documents, and two records side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.record import read_record, showing
from bench.report.compare_records import compare_records
from bench.report.page import html_page, markdown, update
from layerskip_models.text_files import write_text
from selfspec.cli.arguments import checked_output_file
from selfspec.cli.console import one_line_errors


def report(
    records: Annotated[
        list[Path] | None, typer.Argument(help="Records that the other commands wrote; with --update documents.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write this file: HTML with plots (needs matplotlib) if it ends in .html, else Markdown. Default: print it.",
            callback=checked_output_file,
        ),
    ] = None,
    in_documents: Annotated[
        bool,
        typer.Option(
            "--update",
            help='Fill the tables of documents between "<!-- table: RECORD NAME -->" and "<!-- /table -->" anew. Default: '
            "README.md and docs/.",
        ),
    ] = False,
) -> None:
    """Turn records into a page: what came out, tables, and where the numbers come from."""
    with one_line_errors():
        if in_documents:
            pages = records or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
            texts = {page: page.read_text(encoding="utf-8") for page in pages}
            fresh = {page: update(text, Path()) for page, text in texts.items()}
            for page, text in fresh.items():
                if text != texts[page]:
                    write_text(page, text)
                    typer.echo(f"{page}: new tables")
            return
        if not records:
            raise ValueError("name at least one record")
        found = {path: read_record(path) for path in records}
        shown = []
        for path, lines in found.items():
            with showing(path):
                shown.append(html_page({path.stem: lines}) if _is_html(output) else markdown(lines))
        text = "\n".join(shown)
        if output is None:
            typer.echo(text, nl=False)
        else:
            output.write_text(text, encoding="utf-8")


def _is_html(output: Path | None) -> bool:
    return output is not None and output.suffix in (".html", ".htm")


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A record.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another of the same kind.")],
) -> None:
    """Show two records side by side: what changed in how they were made, speeds, and whether outputs are the same."""
    with one_line_errors():
        left, right = read_record(before), read_record(after)
        with showing(before), showing(after):
            notes, table = compare_records(left, right)
    for note in notes:
        typer.echo(note)
    typer.echo(table.markdown(aligned=True))
