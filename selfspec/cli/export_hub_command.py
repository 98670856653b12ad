"""`selfspec export-hub`: write a folder that decodes with selfspec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.console import LogConsole, one_line_errors
from selfspec.defaults import DEFAULT_POLICY
from selfspec.integrations.hub_folder import export_hub
from selfspec.options import POLICY_HELP


def export_hub_command(
    model: Annotated[str, typer.Argument(help="Hub name or folder of a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write: a new one, or an empty one.")],
    policy: Annotated[str, typer.Option(help=f"Policy for calls that name none. {POLICY_HELP}")] = DEFAULT_POLICY,
    link: Annotated[
        bool, typer.Option("--link", help="Link to the files with the weights instead of copying them.")
    ] = False,
) -> None:
    """Write a folder that transformers decodes from with selfspec: from_pretrained, pipeline, serve."""
    with one_line_errors():
        written = export_hub(model, folder, policy=policy, link=link)
    LogConsole().print(
        f"wrote {written}; load it with AutoModelForCausalLM.from_pretrained({str(written)!r}, trust_remote_code=True)"
    )
