"""Fields of dataclasses that say their help text and what they allow, and how they become options of a command."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, get_origin, get_type_hints

import typer


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of numbers. ends: which of its two ends belong to it, as in "[)"."""

    low: float
    high: float = math.inf
    ends: str = "[]"

    def __contains__(self, value: float) -> bool:
        high_enough = value >= self.low if self.ends[0] == "[" else value > self.low
        return high_enough and (value <= self.high if self.ends[1] == "]" else value < self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low}" if self.ends[0] == "[" else f"above {self.low}"
        return f"in {self.ends[0]}{self.low}, {self.high}{self.ends[1]}"


AT_LEAST_1, AT_LEAST_0, ABOVE_0 = Range(1), Range(0), Range(0, ends="(]")


def option(
    default: Any,
    help: str,
    allowed: Range | Sequence[str] | None = None,
    *,
    argument: bool = False,
    flags: Sequence[str] = (),
    **others: Any,
) -> Any:
    """Make a field of a dataclass. default: MISSING for a field that must be given.

    allowed: a range of numbers, or the words to choose from. argument: the command line takes it without a name.
    flags: its names on the command line, if not just its own. others: arguments of `typer.Option`.
    """
    about = {"help": help, "allowed": allowed, "argument": argument, "flags": flags, "others": others}
    return field(default=default, metadata=about)


def parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    """List a dataclass's fields as typer reads them, required ones first. Tuples become lists, as typer has them."""
    hints = get_type_hints(group, include_extras=True)
    parameters = []
    for item in sorted(fields(group), key=lambda item: item.default is not MISSING):
        kind: Any = hints[item.name]
        default: Any = item.default
        if get_origin(kind) is tuple:
            kind, default = list[kind.__args__[0]], default if default is MISSING else list(default)
        if item.metadata:  # else its type has typer's annotation
            about = item.metadata
            made = typer.Argument if about["argument"] else typer.Option
            kind = Annotated[kind, made(*about["flags"], help=about["help"], **about["others"])]
        parameters.append(
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=kind,
            )
        )
    return parameters
