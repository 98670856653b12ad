"""`selfspec train`, `train-exit` and `train-pacer`: an option for each field of a training's settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from layerskip_models.option_fields import parameters_of
from layerskip_models.training.layerskip import train
from layerskip_models.training.training_config import TrainingConfig
from selfspec.exits.settings import ExitTraining
from selfspec.exits.training import train_exit
from selfspec.pacer.settings import PreVerifierTraining
from selfspec.pacer.training import train_preverifier


def _command(about: str, settings: type[Any], run: Callable[[Any], Path], next_step: str) -> Callable[..., None]:
    """Make a typer-ready function that calls `run` with settings. next_step: how the result is used; {} is its folder.

    A ValueError or OSError (a wrong value, a missing file) becomes one line on stderr and exit status 2; Ctrl-C, one
    line and exit status 130.
    """
    parameters = parameters_of(settings)

    def command(**values: Any) -> None:
        try:
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            folder = run(settings(**values))
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


train_command = _command(
    "Train a Llama with the LayerSkip recipe: layer dropout and early-exit loss.",
    TrainingConfig,
    train,
    'selfspec generate "Once" --model {}',
)
train_pacer_command = _command(
    "Train Pacer's pre-verifier for a LayerSkip checkpoint.",
    PreVerifierTraining,
    train_preverifier,
    "selfspec generate --policy pacer:{}",
)
train_exit_command = _command(
    "Train exit adapters for a frozen checkpoint: its drafts get better, and its output stays the same.",
    ExitTraining,
    train_exit,
    "selfspec generate --model MODEL --exits {}",
)
