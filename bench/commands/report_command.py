"""`selfspec-bench report`: records as Markdown, and tables of documents."""

from __future__ import annotations

from pathlib import Path

import typer

from bench.commands.bench_options import ReportCommand
from bench.record import read_record, showing
from bench.report.page import markdown, update
from layerskip_models.text_files import write_text
from selfspec.cli.console import one_line_errors


def report(options: ReportCommand) -> None:
    with one_line_errors():
        if options.in_documents:
            pages = options.records or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
            texts = {page: page.read_text(encoding="utf-8") for page in pages}
            fresh = {page: update(text, Path()) for page, text in texts.items()}
            for page, text in fresh.items():
                if text != texts[page]:
                    write_text(page, text)
                    typer.echo(f"{page}: new tables")
            return
        if not options.records:
            raise ValueError("name at least one record")
        shown = []
        for path in options.records:
            lines = read_record(path)
            with showing(path):
                shown.append(markdown(lines))
    typer.echo("\n".join(shown), nl=False)
