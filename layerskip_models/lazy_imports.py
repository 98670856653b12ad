"""A package's public names, whose modules are imported when a name is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_imports(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the package's `__getattr__` and `__dir__` (PEP 562). places: the module of each name."""
    own = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = own[name] = getattr(import_module(places[name]), name)
        return value

    return get, lambda: sorted({*own, *own["__all__"]})
