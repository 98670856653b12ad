"""`selfspec-bench`: measure policies and engines, and show what was measured."""

from __future__ import annotations

import signal
import sys
from typing import Any

import typer
from transformers.utils import logging
from typer.core import TyperGroup

from bench.commands.batch_command import batch
from bench.commands.context_command import context
from bench.commands.kernels_command import kernels
from bench.commands.load_command import load
from bench.commands.peers_command import peers
from bench.commands.report_command import compare, report
from bench.commands.roofline_command import roofline
from bench.commands.run_command import run
from bench.commands.sweep_command import sweep
from selfspec.cli.console import one_line_errors
from selfspec.removed import refuse_removed


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with one_line_errors():
            refuse_removed(args[0], args[1:], program="selfspec-bench")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Measure self-speculative decoding: against transformers, and over exit layers and lengths.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (run, peers, sweep, batch, context, load, kernels, roofline, report, compare):
    app.command()(command)


def main() -> None:
    """Entry point of `selfspec-bench`."""
    # transformers' hints and loading bars would break the progress bar; errors are still raised.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what was started, too
    app()
