"""A command-line option for every field of a settings class, such as TrainingConfig."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from layerskip_models.option_fields import parameters_of
from layerskip_models.training.training_config import TrainingConfig


def command_for_config(
    run: Callable[[Any], Path],
    config_class: type[Any] = TrainingConfig,
    about: str = "Train a Llama with the LayerSkip recipe: layer dropout and early-exit loss.",
    next_step: str = 'selfspec generate "Once" --model {}',
) -> Callable[..., None]:
    """Make a typer-ready function that has an option for each field of the class and calls `run` with an instance.

    run: returns the folder of what it made. config_class: a dataclass whose fields are made by `option_fields.option`.
    about: the command's own help. next_step: how the result is used; {} stands for its folder.
    A ValueError or OSError (a wrong value, a missing file) becomes one line on stderr and exit status 2; Ctrl-C, one
    line and exit status 130.
    """
    parameters = parameters_of(config_class)

    def command(**values: Any) -> None:
        try:
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            folder = run(config_class(**values))
        except (ValueError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted: repeat the same command to go on from the newest checkpoint", err=True)
            raise typer.Exit(130) from None
        if os.environ.get("RANK", "0") == "0":  # one message for all processes of a launcher
            typer.echo(f"saved to {folder}; use it with: {next_step.format(folder)}", err=True)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = about
    return command
