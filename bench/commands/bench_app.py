"""`selfspec-bench`: measure policies and engines, and show what was measured."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from bench.commands.bench_options import COMMANDS
from layerskip_models.option_fields import parameters_of
from selfspec.cli.console import LogConsole
from selfspec.cli.option_groups import with_parameters

app = typer.Typer(
    help="Measure self-speculative decoding: against transformers, and over exit layers and lengths.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _command(name: str, options: type[Any]) -> Callable[..., None]:
    def command(**values: Any) -> None:
        with LogConsole().starting():
            work = getattr(import_module(f"bench.commands.{name}_command"), name)
        work(options(**values))

    return with_parameters(command, parameters_of(options), options.__doc__)


for name, options in COMMANDS.items():
    app.command(name)(_command(name, options))


def main() -> None:
    """Entry point of `selfspec-bench`."""
    # transformers' hints and loading bars would break the progress bar; errors are still raised.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what was started, too
    app()
