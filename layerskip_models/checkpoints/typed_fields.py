"""Values that were read from a JSON file, compared with the types of the dataclass that they are for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any


def is_int(value: Any) -> bool:
    """Return whether this is a whole number, and neither true nor false."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether this is a finite number, and neither true nor false."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", is_int),
    "float": ("a number", is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "tuple[int, ...]": ("whole numbers", lambda value: isinstance(value, tuple) and all(map(is_int, value))),
    "tuple[float, ...]": ("numbers", lambda value: isinstance(value, tuple) and all(map(is_number, value))),
    "dict[str, Any]": ("fields", lambda value: isinstance(value, dict)),
    "dict[str, float]": (
        "numbers by name",
        lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
    ),
}


def check_types(config: Any) -> None:
    """ValueError that names the first field of a dataclass with a value of another type than it declares.

    Numbers must be finite. Types other than those above are left to the class.
    """
    for field in fields(config):
        meant, fits = _TYPES.get(str(field.type), ("", lambda value: True))
        value = getattr(config, field.name)
        if not fits(value):
            raise ValueError(f"{field.name} must be {meant}, got {value!r}")
