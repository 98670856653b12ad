"""The command `selfspec`: its commands are put together here, each from a file of its own.

Generated text goes to standard output and everything about it to standard error, so that a pipe gets the text alone. A wrong
call ends with status 2 and one line that says what to do; Ctrl-C ends with 130 and keeps what was generated.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from selfspec.cli.console import gc_paused, one_line_errors
from selfspec.removed import refuse_removed

COMMANDS = {
    "generate": "Continue a prompt: print the text as it is generated, then a summary of what speculation did.",
    "chat": "Talk to a model. /help lists the commands; Ctrl-C stops an answer and keeps the conversation.",
    "get": "Download a model that can then be used by its short name, for example: selfspec chat smollm2.",
    "trace": "Decode greedily and show every round: exit layer, drafts and their fate, threshold, estimated acceptance.",
    "inspect": "Say what the default policy gains on this model, and where its drafts come from.",
    "verify": "Check on this machine that the engine's output equals that of the model as transformers runs it.",
    "serve": "Serve a model to OpenAI clients: chat, completions, streams, metrics.",
    "train": "Train a Llama with the LayerSkip recipe: layer dropout and early-exit loss.",
    "train-pacer": "Train Pacer's pre-verifier for a LayerSkip checkpoint.",
    "train-exit": "Train exit adapters for a frozen checkpoint: its drafts get better, and its output stays the same.",
    "export-hub": "Write a folder that transformers decodes from with selfspec: from_pretrained, pipeline, serve.",
}
"""The commands, with a line of help for the list, which imports none of their modules."""
_TOGETHER = {
    **dict.fromkeys(("trace", "inspect", "verify"), "analysis_commands"),
    **dict.fromkeys(("train", "train-pacer", "train-exit"), "training_commands"),
}
"""Modules of several commands. Others have one of their own, such as `get_command`."""


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        with one_line_errors():
            refuse_removed(cmd_name)
        return _Command(cmd_name) if cmd_name in COMMANDS else None


class _Command(TyperCommand):
    """A command whose module is imported when it is called; until then it has a name and a line of help."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=COMMANDS[name])

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with one_line_errors():
            refuse_removed(str(info_name), args)
        return self.imported().make_context(info_name, args, parent, **extra)

    def imported(self) -> Any:
        """Import the command itself."""
        name = str(self.name)
        function = f"{name.replace('-', '_')}_command"
        with gc_paused():
            called = getattr(import_module(f"selfspec.cli.{_TOGETHER.get(name, function)}"), function)
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(called)
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
