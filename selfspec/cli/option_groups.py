"""Options that several commands share, as groups: a command's function takes a group as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints, is_typeddict

import typer

from selfspec.options import POLICY_HELP, described

MODEL_HELP = "Hub name or folder (default: the demo model)."
ModelOption = Annotated[str | None, typer.Option(help=MODEL_HELP, rich_help_panel="Model")]
ModelArgument = Annotated[str | None, typer.Argument(help=MODEL_HELP)]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16, float16, float64, int8 or int4. On a CPU, 4 to 16 bits apply to the weights only.",
        rich_help_panel="Model",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel="Model")]
ExitsOption = Annotated[
    str,
    typer.Option(
        help="Exit adapters to draft with: auto (those stored with the checkpoint, if any), none, or a folder written by "
        "train-exit.",
        rich_help_panel="Model",
    ),
]
PolicyOption = Annotated[str | None, typer.Option(help=POLICY_HELP, rich_help_panel="Speculation")]
CopyFromOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="UTF-8 text file to copy drafts from, in addition to the prompt and the generated text; repeatable.",
        rich_help_panel="Speculation",
    ),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        help='Jinja file, or "plain" (questions and answers, for base models). '
        "Default: the tokenizer's own; plain for the demo model.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a checkpoint."""

    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    exits: ExitsOption = "auto"
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the KV cache: auto (that of the arithmetic) or bfloat16 (half the memory of float32, "
            "slightly different results).",
            rich_help_panel="Model",
        ),
    ] = "auto"


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for every field of the groups among its parameters.

    A group is a dataclass whose fields have typer's annotations, or a TypedDict of `selfspec.options`. The function gets an
    instance of it, in which an option that was not given is None.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) or is_typeddict(kind):
            groups[parameter.name] = kind
            parameters += _parameters(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{parameter.name: values.pop(parameter.name) for parameter in _parameters(kind)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _parameters(group: Any) -> list[inspect.Parameter]:
    if is_dataclass(group):
        hints = get_type_hints(group, include_extras=True)
        found = [(field.name, hints[field.name], field.default) for field in fields(group)]
    else:
        found = [
            (
                name,
                Annotated[
                    (option.kind | None) if option.kind else kind,
                    typer.Option(*option.flags, help=option.help, rich_help_panel=option.panel),
                ],
                None,
            )
            for name, (kind, option) in described(group).items()
            if option.help
        ]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in found
    ]
