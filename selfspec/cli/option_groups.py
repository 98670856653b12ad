"""Options that several commands share, as groups: a command's function takes a group as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, is_typeddict

import typer
from typing_extensions import get_type_hints

from layerskip_models.option_fields import option as option_field
from layerskip_models.option_fields import parameters_of
from selfspec import SelfSpecGenerator
from selfspec.options import POLICY_HELP, SamplingOptions, SpeculationOptions, described

_PANELS: dict[Any, str] = {SamplingOptions: "Sampling", SpeculationOptions: "Speculation"}
MODEL_HELP = "Hub name, folder, GGUF file, or a name that `selfspec get` knows (default: the demo model)."
ModelOption = Annotated[str | None, typer.Option(help=MODEL_HELP, rich_help_panel="Model")]
ModelArgument = Annotated[str | None, typer.Argument(help=MODEL_HELP)]


PolicyOption = Annotated[str | None, typer.Option(help=POLICY_HELP, rich_help_panel="Speculation")]
_COPY_HELP = "UTF-8 text file to copy drafts from, in addition to the prompt and the generated text; repeatable."
CopyFromOption = Annotated[list[Path] | None, typer.Option(help=_COPY_HELP, rich_help_panel="Speculation")]
_TEMPLATE_HELP = (
    'Jinja file, or "plain" (questions and answers, for base models). '
    "Default: the tokenizer's own; plain for the demo model."
)
ChatTemplateOption = Annotated[str | None, typer.Option(help=_TEMPLATE_HELP)]


def option(default: Any, help: str, panel: str | None = None, *flags: str, **others: Any) -> Any:
    """Make a field of a group, as `option_fields.option`. A flag off by default needs its name among the flags."""
    return option_field(default, help, flags=flags, rich_help_panel=panel, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    dtype: str = option(
        "auto",
        "auto, float32, bfloat16, float16, float64, int8 or int4. On a CPU, 4 to 16 bits apply to the weights only.",
        "Model",
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...", "Model")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(DeviceOptions):
    exits: str = option(
        "auto",
        "Exit adapters to draft with: auto (those stored with the checkpoint, if any), none, or a folder from train-exit.",
        "Model",
    )
    kv_dtype: str = option(
        "auto",
        "Data type of the KV cache: auto (that of the arithmetic) or bfloat16 (half the memory of float32, slightly "
        "different results).",
        "Model",
    )
    draft_weights: str = option(
        "auto",
        "A copy of the weights in fewer bits to draft with: auto (8 bits, where exits promise less and there is room; for "
        "serve none), none, int8 or int4.",
        "Model",
    )

    def generator(self, name: str, **others: Any) -> SelfSpecGenerator:
        """Load a checkpoint. others: further arguments of `SelfSpecGenerator.from_pretrained`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["exits"] = None if self.exits == "none" else self.exits
        return SelfSpecGenerator.from_pretrained(name, **values, **others)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command one option for every field of the groups among its parameters.

    A group is a dataclass of `option`s, or a TypedDict of `selfspec.options`. The function gets an instance of it. In a
    TypedDict an option that was not given is None.
    """
    groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) or is_typeddict(kind):
            found = parameters_of(kind) if isinstance(kind, type) and is_dataclass(kind) else _written_options(kind)
            groups[parameter.name] = kind, found
            parameters += found
        else:
            parameters.append(parameter.replace(annotation=kind, kind=parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        made = {  # apart, because an option may be named like a group
            name: kind(**{parameter.name: values.pop(parameter.name) for parameter in found})
            for name, (kind, found) in groups.items()
        }
        command(**values, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _written_options(group: Any) -> list[inspect.Parameter]:
    """List the options of a TypedDict that have a help text, as typer reads them."""
    panels = {name: panel for part, panel in _PANELS.items() for name in described(part)}
    parameters = []
    for name, (kind, about) in described(group).items():
        if about.help:
            made = typer.Option(*about.flags, help=about.help, rich_help_panel=panels.get(name, "Text"))
            annotation: Any = (about.kind | None) if about.kind else kind
            annotation = Annotated[annotation, made]
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    return parameters
