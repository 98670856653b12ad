"""The command `selfspec`: its commands are put together here, each from a file of its own.

Generated text goes to standard output and everything about it to standard error, so that a pipe gets the text alone. A wrong
call ends with status 2 and one line that says what to do; Ctrl-C ends with 130 and keeps what was generated.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "generate": "selfspec.cli.generate_command:generate_command",
    "chat": "selfspec.cli.chat_command:chat_command",
    "get": "selfspec.cli.get_command:get_command",
    "trace": "selfspec.cli.analysis_commands:trace_command",
    "inspect": "selfspec.cli.analysis_commands:inspect_command",
    "verify": "selfspec.cli.analysis_commands:verify_command",
    "serve": "selfspec.cli.serve_command:serve_command",
    "train": "layerskip_models.training.loop:train_command",
    "train-pacer": "selfspec.cli.training_commands:train_pacer_command",
    "train-exit": "selfspec.cli.training_commands:train_exit_command",
    "export-hub": "selfspec.cli.export_commands:export_hub_command",
    "export-draft": "selfspec.cli.export_commands:export_draft_command",
    "lm-eval": "selfspec.cli.lm_eval_command:lm_eval_command",
}
"""Where the function of each command is. Only the module of the command that is called gets imported."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "lm-eval": {
        "add_help_option": False,
        "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    }
}


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        alone = typer.Typer(add_completion=False)
        alone.command(cmd_name, **_OPTIONS.get(cmd_name, {}))(getattr(import_module(module), name))
        return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="LayerSkip self-speculative decoding: a model drafts with its first layers and verifies with the rest.",
)


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
