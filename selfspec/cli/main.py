"""The command `selfspec`: its commands are put together here, each from a file of its own.

Generated text goes to standard output and everything about it to standard error, so that a pipe gets the text alone. A wrong
call ends with status 2 and one line that says what to do; Ctrl-C ends with 130 and keeps what was generated.
"""

from __future__ import annotations

from typing import Annotated

import typer

from layerskip_models.training.loop import train_command
from layerskip_models.training.options import command_for_config
from selfspec import __version__
from selfspec.cli.analysis_commands import inspect_command, trace_command, verify_command
from selfspec.cli.chat_command import chat_command
from selfspec.cli.export_commands import export_draft_command, export_hub_command
from selfspec.cli.generate_command import generate_command
from selfspec.cli.get_command import get_command
from selfspec.cli.lm_eval_command import lm_eval_command
from selfspec.cli.serve_command import serve_command
from selfspec.exits.settings import ExitTraining
from selfspec.exits.training import train_exit
from selfspec.pacer.settings import PreVerifierTraining
from selfspec.pacer.training import train_preverifier

app = typer.Typer(
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
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.callback()
def _selfspec(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("get")(get_command)
app.command("trace")(trace_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("serve")(serve_command)
app.command("train")(train_command)
app.command("train-pacer")(
    command_for_config(
        train_preverifier,
        PreVerifierTraining,
        "Train Pacer's pre-verifier for a LayerSkip checkpoint.",
        "selfspec generate --policy pacer:{}",
    )
)
app.command("train-exit")(
    command_for_config(
        train_exit,
        ExitTraining,
        "Train exit adapters for a frozen checkpoint: its drafts get better, and its output stays the same.",
        "selfspec generate --model MODEL --exits {}",
    )
)
app.command("export-hub")(export_hub_command)
app.command("export-draft")(export_draft_command)
app.command(
    "lm-eval", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(lm_eval_command)


if __name__ == "__main__":
    main()
