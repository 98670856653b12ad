"""The command `selfspec`. Generated text goes to standard output and all else to standard error, so a pipe gets text."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec.cli.commands import COMMANDS

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="LayerSkip self-speculative decoding: a model drafts with its first layers and verifies with the rest.",
)
for name, command in COMMANDS.items():
    app.command(name)(command)


def main() -> None:
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        from selfspec import __version__

        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.callback()
def _selfspec(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
