"""Standard error of a command: its log, and errors in one line; and Ctrl-C. For commands that need no model, too."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from textwrap import fill
from typing import Any

import typer
from rich.console import Console

from layerskip_models.lazy_imports import gc_paused

USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError)
_PICTURES = 0x2400  # Unicode's pictures of the first 32 control characters
_VISIBLE: dict[int, int | str] = {
    **{code: _PICTURES + code for code in range(32) if chr(code) not in "\t\n"},
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},  # U+009B alone acts like ESC [
    0x7F: 0x2421,
}
_VISIBLE_LINE = {**_VISIBLE, ord("\n"): "\u23ce", ord("\t"): "\u21e5"}


def visible(text: str) -> str:
    """Make control characters in the text visible, except tab and newline."""
    return text.translate(_VISIBLE)


def visible_line(text: str) -> str:
    """Do the same on one line: tab and newline become visible too."""
    return text.translate(_VISIBLE_LINE)


class LogConsole(Console):
    """Standard error, for everything but the generated text.

    Control characters become visible, because the text may come from a model or a stranger. A terminal gets lines that break
    between words, and a file whole ones. A word that is longer than a line, such as a path, stays as it is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stderr": True, "highlight": False, "markup": False, "soft_wrap": True, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        shown = [self._in_lines(one) if isinstance(one, str) else one for one in objects]
        styled = self.is_terminal and not all(isinstance(one, str) for one in objects)
        super().print(*shown, **{"soft_wrap": not styled, **options})

    def _in_lines(self, text: str) -> str:
        lines = visible(text).split("\n")
        if self.is_terminal:  # rich would cut a long word, and add spaces
            wrap = partial(fill, width=self.width, break_long_words=False, break_on_hyphens=False)
            lines = [wrap(line) if len(line) > self.width else line for line in lines]
        return "\n".join(lines)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Show that the program starts, which takes seconds: what a command needs is imported within it."""
        with self.status("Starting ..."), gc_paused():
            yield


@contextmanager
def one_line_errors(interrupted: str = "interrupted") -> Iterator[None]:
    """Print an error in one line. Exit status 2 for the user's, 1 for a model that fails, and 130 for Ctrl-C."""
    try:
        yield
    except BrokenPipeError:  # `| head`: typer ends quietly
        raise
    except KeyboardInterrupt:
        LogConsole().print(interrupted)
        raise typer.Exit(130) from None
    except USER_ERRORS as error:
        if isinstance(error, RuntimeError) and not _is_of_the_model(error):
            raise
        LogConsole().print(f"error: {' '.join(str(error).split())}")
        raise typer.Exit(1 if isinstance(error, RuntimeError) else 2) from None


def _is_of_the_model(error: RuntimeError) -> bool:
    if "torch" not in sys.modules:
        return False
    from torch import OutOfMemoryError

    from selfspec import NonFiniteLogitsError

    return isinstance(error, (NonFiniteLogitsError, OutOfMemoryError))


class Interrupt:
    """A stopping criterion, in the main thread: Ctrl-C ends the text at the next token, twice raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def __call__(self, *text_and_scores: object) -> bool:
        return self.requested

    def _on_signal(self, *number_and_frame: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
