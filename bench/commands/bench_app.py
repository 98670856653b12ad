"""`selfspec-bench`: run (policies and engines over tasks), sweep (best fixed setting), peers, report, compare."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from bench.commands.batch_command import batch
from bench.commands.chat_command import chat
from bench.commands.context_command import context
from bench.commands.convert_command import convert_weights
from bench.commands.peers_command import peers
from bench.commands.report_command import report
from bench.commands.roofline_command import roofline
from bench.commands.run_command import run
from bench.commands.serving_command import serving
from bench.commands.shapes_command import shapes
from bench.commands.sweep_command import sweep
from bench.record import read_record, showing
from bench.report.compare_records import compare_records
from bench.report.table import print_tables
from selfspec.cli.notes import one_line_errors

app = typer.Typer(
    help="Measure self-speculative decoding: against transformers, and over exit layers and lengths.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(run)
app.command()(peers)
app.command("convert")(convert_weights)
app.command()(chat)
app.command()(shapes)
app.command()(sweep)
app.command()(roofline)
app.command()(context)
app.command()(batch)
app.command()(serving)
app.command()(report)


@app.command()
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
    print_tables([table])


def main() -> None:
    """Entry point of `selfspec-bench`."""
    # transformers' hints and loading bars would break the progress bar; errors are still raised.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what was started, too
    app()
