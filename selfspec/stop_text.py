"""Where a stop string ends a text, and how much of a text that is still being written may become one."""

from __future__ import annotations

from collections.abc import Sequence


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of these strings."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found, default=len(text))]


def open_end(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    sizes = range(min(len(text), max(map(len, stops), default=0)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)
