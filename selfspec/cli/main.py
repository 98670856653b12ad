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
    "generate": (
        "selfspec.cli.generate_command:generate_command",
        "Continue a prompt: print the text as it is generated, then a summary of what speculation did.",
    ),
    "chat": (
        "selfspec.cli.chat_command:chat_command",
        "Talk to a model. /help lists the commands; Ctrl-C stops an answer and keeps the conversation.",
    ),
    "get": (
        "selfspec.cli.get_command:get_command",
        "Download a model that can then be used by its short name, for example: selfspec chat smollm2.",
    ),
    "trace": (
        "selfspec.cli.analysis_commands:trace_command",
        "Decode a prompt greedily and show every round: exit layer, drafts and their fate, threshold, estimated acceptance.",
    ),
    "inspect": (
        "selfspec.cli.analysis_commands:inspect_command",
        "Say whether a checkpoint is worth self-speculating with: agreement per layer, speed-up predicted and measured.",
    ),
    "verify": (
        "selfspec.cli.analysis_commands:verify_command",
        "Check on this machine that the engine's output equals that of the model as transformers runs it.",
    ),
    "serve": (
        "selfspec.cli.serve_command:serve_command",
        "Serve a model to OpenAI clients: chat, completions, streams, metrics.",
    ),
    "train": (
        "selfspec.cli.training_commands:train_command",
        "Train a Llama with the LayerSkip recipe: layer dropout and early-exit loss.",
    ),
    "train-pacer": (
        "selfspec.cli.training_commands:train_pacer_command",
        "Train Pacer's pre-verifier for a LayerSkip checkpoint.",
    ),
    "train-exit": (
        "selfspec.cli.training_commands:train_exit_command",
        "Train exit adapters for a frozen checkpoint: its drafts get better, and its output stays the same.",
    ),
    "export-hub": (
        "selfspec.cli.export_command:export_hub_command",
        "Write a folder that transformers decodes from with selfspec (from_pretrained, pipeline, transformers serve).",
    ),
}
"""Places of the commands' functions, and lines for the list of commands. Only the module of the command that is called
gets imported, none for the list."""


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
        self._place, summary = COMMANDS[name]
        super().__init__(name, help=summary)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with one_line_errors():
            refuse_removed(str(info_name), args)
        return self.imported().make_context(info_name, args, parent, **extra)

    def imported(self) -> Any:
        """Import the command itself."""
        module, _, function = self._place.partition(":")
        with gc_paused():
            called = getattr(import_module(module), function)
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
