"""What keeps a start short: names whose modules are imported when first asked for, and a pause of Python's collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def gc_paused() -> Iterator[None]:
    """Let Python's collector rest: it would look at all imported objects again and again, and starting leaves no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
