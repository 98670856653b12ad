"""The options of a generation: names, types, ranges and help texts, each said once.

Python calls, the command line, prompts files, the server and `custom_generate` all read them here. They are
TypedDicts: a type checker then checks the keyword arguments of every call. pydantic comes with the `serve` extra only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

from layerskip_models.option_fields import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Range

if TYPE_CHECKING:
    from torch import Generator
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    from policies import Policy
    from selfspec.cache.copy_index import CopyFrom

POLICY_HELP = (
    'For example "auto", "del", "ls:3-6" (exit after 3 layers, draft 6), "spide:3,tau=0.7", "del+dv", "ar" (plain decoding), '
    '"ls:3-8+my_file.py:MyStop" (a class of your own); docs/policies.md has all (default: auto).'
)


@dataclass(frozen=True, slots=True)
class Option:
    """The part of an option that its type does not say.

    help: for the command line, which has only the options with a help text. flags: its names there, if not just its own.
    kind: its type there, if it differs. allowed: a range of numbers.
    """

    help: str = ""
    allowed: Range | None = None
    flags: tuple[str, ...] = ()
    kind: Any = None


class TextOptions(TypedDict, total=False):
    max_new_tokens: Annotated[int | None, Option("Maximum number of new tokens (default 128).", AT_LEAST_1)]
    repetition_penalty: Annotated[float | None, Option("Above 1 discourages repetition.", ABOVE_0)]
    eos_token_id: Annotated[
        int | list[int] | None, Option("Token id that ends the text; may be given several times.", kind=list[int])
    ]
    stop_strings: Annotated[
        str | list[str] | None, Option("String that ends the text; may be given several times.", kind=list[str])
    ]


class SpeculationOptions(TypedDict, total=False):
    policy: Annotated[str | Policy | None, Option(POLICY_HELP, kind=str)]
    exit_layer: Annotated[int | None, Option("Number of layers that draft; instead of --policy.")]
    num_speculations: Annotated[int | None, Option("Tokens drafted per round; 0 is plain decoding.")]


class SamplingOptions(TypedDict, total=False):
    do_sample: Annotated[
        bool | None,
        Option(
            "Draw tokens at random, or always take the likeliest. Default: what the checkpoint says.",
            flags=("--do-sample/--no-do-sample", " /--greedy"),
        ),
    ]
    temperature: Annotated[float | None, Option("Sampling temperature; 0 is greedy.", AT_LEAST_0)]
    top_k: Annotated[int | None, Option("Draw from the k likeliest tokens only.", AT_LEAST_0)]
    top_p: Annotated[
        float | None, Option("Draw from the likeliest tokens that together have this probability.", Range(0, 1, "(]"))
    ]
    min_p: Annotated[
        float | None, Option("Draw only tokens at least this fraction as likely as the likeliest one.", Range(0, 1))
    ]
    seed: Annotated[int | None, Option("Random seed.", Range(-(2**63), 2**64 - 1))]


class WrittenOptions(TextOptions, SamplingOptions, SpeculationOptions, total=False):
    """Options that can be written down: on the command line, and for one prompt of a prompts file."""

    copy_from: Annotated[CopyFrom | None, Option()]


class GenerationOptions(WrittenOptions, total=False):
    """The keyword arguments of `SelfSpecGenerator.generate` that every way to call it shares."""

    generator: Generator | None
    logits_processor: LogitsProcessorList | None
    stopping_criteria: StoppingCriteriaList | None
    generation_config: GenerationConfig | None
    trace: bool


def described(group: Any) -> dict[str, tuple[Any, Option]]:
    """Collect the type and the description of every option of one of these classes that has a description."""
    of_python = {"Policy": Any, "CopyFrom": Any}  # nobody can write them down, and their modules import PyTorch
    hints = get_type_hints(group, localns=of_python, include_extras=True)
    return {
        name: (get_args(hint)[0], get_args(hint)[1]) for name, hint in hints.items() if hasattr(hint, "__metadata__")
    }


OPTIONS = described(WrittenOptions)
NAMES = tuple(GenerationOptions.__annotations__)


def check_ranges(options: Mapping[str, Any]) -> None:
    """Raise ValueError for a number outside its range, naming the option."""
    for name, (kind, option) in OPTIONS.items():
        value, allowed = options.get(name), option.allowed
        if value is None or allowed is None:
            continue
        numbers: tuple[type[Any], ...] = (int, float) if float in get_args(kind) else (int, Integral)
        wanted = "a number" if float in numbers else "an integer"
        if not isinstance(value, numbers) or isinstance(value, bool) or value not in allowed:
            wanted += f" {'of ' if str(allowed).startswith('at least') else ''}{allowed}"
            raise ValueError(f"{name} must be {wanted}, got {value!r}")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def spelled_out(function: _Function) -> _Function:
    """Show every option in the function's signature instead of `**options`, for `help` and editors."""
    from policies import Policy
    from selfspec.cache.copy_index import CopyFrom

    signature = inspect.signature(function)
    *parameters, last = signature.parameters.values()
    assert last.kind is last.VAR_KEYWORD
    written = get_type_hints(WrittenOptions, localns={"Policy": Policy, "CopyFrom": CopyFrom})
    hints = {name: written.get(name, _as_written(hint)) for name, hint in GenerationOptions.__annotations__.items()}
    options = [
        inspect.Parameter(name, last.KEYWORD_ONLY, default=False if hint == "bool" else None, annotation=hint)
        for name, hint in hints.items()
    ]
    function.__signature__ = signature.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
    return function


def _as_written(hint: Any) -> Any:
    """Write a type as the source has it: transformers' classes are not imported to show their names."""
    return getattr(hint, "__forward_arg__", hint)
