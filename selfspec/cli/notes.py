"""The console for everything but the generated text."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from selfspec.visible_text import visible


class NotesConsole(Console):
    """Standard error. Control characters become visible, because the text may come from a model or a stranger."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stderr": True, "highlight": False, "markup": False, "soft_wrap": True, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(one) if isinstance(one, str) else one for one in objects), **options)
