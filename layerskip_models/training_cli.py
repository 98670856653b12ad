"""A command-line option for every field of TrainingConfig."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from layerskip_models.training_config import TrainingConfig, config_fields


def command_for_config(run: Callable[[TrainingConfig], Any]) -> Callable[..., None]:
    """A typer-ready function with one option per field of TrainingConfig, named like it, that calls `run` with them.

    A ValueError or OSError (a wrong value, a missing file) becomes one line on stderr and exit status 2.
    """
    hints = get_type_hints(TrainingConfig)
    parameters: list[inspect.Parameter] = []
    annotations: dict[str, Any] = {}
    for item in config_fields():
        kind: Any = hints[item.name]
        is_tuple = get_origin(kind) is tuple
        if is_tuple:
            kind = list[str]  # typer has no tuples of any length
        required = item.name in ("data", "output_dir")
        annotation = Annotated[kind, typer.Option(help=item.metadata["help"])]
        default: Any = inspect.Parameter.empty if required else item.default
        if is_tuple and not required:
            default = list(default)
        parameters.append(
            inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
        annotations[item.name] = annotation

    def command(**values: Any) -> None:
        """Train a Llama with the LayerSkip recipe: layer dropout and early-exit loss."""
        try:
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            run(TrainingConfig(**values))
        except (ValueError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = annotations
    return command
