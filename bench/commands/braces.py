"""A policy's name with braces as a grid: "spide:3,tau={0.5,0.6}" stands for two policies, several braces for all pairs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

_SPAN = re.compile(r"(\d+)-(\d+)")
_POSITIONS = ("exit layer", "drafts a round")
"""What the first two numbers of a policy's arguments are, as in "ls:E-G" and "spide:E"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPolicy:
    """One policy of a grid. values: what each of the grid's axes is in its name."""

    name: str
    values: Mapping[str, str]


def expand(template: str) -> list[GridPolicy]:
    """All policies that a name with braces stands for, the last brace varying fastest; one without braces is itself.

    In braces stand values separated by commas; "1-4" among whole numbers is 1, 2, 3, 4. An axis is called after the option
    that its brace belongs to ("tau"), or what its place means ("exit layer").
    Raises ValueError for braces that do not close, are nested or empty, and for values that come twice.
    """
    fixed, choices = _split(template)
    axes = _axes(fixed)
    found = []
    for chosen in product(*choices):
        name = fixed[0] + "".join(value + text for value, text in zip(chosen, fixed[1:]))
        found.append(GridPolicy(name=name, values=dict(zip(axes, chosen))))
    return found


def expand_all(templates: Iterable[str]) -> list[str]:
    """The names of all policies that some names stand for; errors as in `expand`."""
    return [policy.name for template in templates for policy in expand(template)]


def _split(template: str) -> tuple[list[str], list[list[str]]]:
    """The texts around braces, one more than there are braces, and the values in each."""
    fixed: list[str] = []
    choices: list[list[str]] = []
    rest = template
    while True:
        before, brace, behind = rest.partition("{")
        if "}" in before:
            raise ValueError(f"policy {template!r}: a brace closes that was not opened")
        fixed.append(before)
        if not brace:
            return fixed, choices
        inner, close, rest = behind.partition("}")
        if not close:
            raise ValueError(f"policy {template!r}: a brace is not closed")
        if "{" in inner:
            raise ValueError(f"policy {template!r}: braces cannot be nested")
        choices.append(_values(template, inner))


def _values(template: str, inner: str) -> list[str]:
    values: list[str] = []
    for part in inner.split(","):
        text = part.strip()
        if not text:
            raise ValueError(f"policy {template!r}: {{{inner}}} lacks a value; write as in tau={{0.5,0.6}}")
        span = _SPAN.fullmatch(text)
        numbers = range(int(span[1]), int(span[2]) + 1) if span else ()
        if span and not numbers:
            raise ValueError(f"policy {template!r}: {text} in braces must rise")
        values += map(str, numbers) if span else [text]
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"policy {template!r}: {', '.join(twice)} comes twice in {{{inner}}}")
    return values


def _axes(fixed: Sequence[str]) -> list[str]:
    """A name for each brace, from the text before it; distinct, since one policy may have an option twice."""
    names: list[str] = []
    for number in range(len(fixed) - 1):
        before = "0".join(fixed[: number + 1])  # a digit stands for the value of an earlier brace
        option = re.search(r"(\w+)=[^=,+:]*$", before)
        place = re.search(r":(?P<first>\w+-)?\w*$", before)
        if option:
            name = option[1]
        elif place:
            name = _POSITIONS[1 if place["first"] else 0]
        else:
            name = "policy"
        same = sum(other == name or other.startswith(f"{name} ") for other in names)
        names.append(f"{name} {same + 1}" if same else name)
    return names
