"""What a command says on standard error: notes, and errors in one line. Imported by commands that need no model, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from selfspec.visible_text import visible


class NotesConsole(Console):
    """Standard error. Control characters become visible, because the text may come from a model or a stranger."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stderr": True, "highlight": False, "markup": False, "soft_wrap": True, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(one) if isinstance(one, str) else one for one in objects), **options)


def notes_console(quiet: bool = False) -> Console:
    """Standard error, for everything but the generated text."""
    return NotesConsole(quiet=quiet)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error in one line. Exit status 2 for errors that the user can fix, 1 for a model that fails."""
    try:
        yield
    except BrokenPipeError:  # `| head`: typer ends quietly
        raise
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        typer.echo(f"error: {visible(' '.join(str(error).split()))}", err=True)
        raise typer.Exit(status) from None


def _status(error: Exception) -> int | None:
    if isinstance(error, (ValueError, TypeError, OSError)):
        return 2
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return None
    from torch import OutOfMemoryError

    from selfspec import NonFiniteLogitsError

    return 1 if isinstance(error, (NonFiniteLogitsError, OutOfMemoryError)) else None
