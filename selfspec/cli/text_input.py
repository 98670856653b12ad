"""The texts that commands read: a prompt (an argument, a file, standard input, an example), and files to copy drafts from."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE_PROMPT = (
    "Translate German to English: Ich habe ein neues Auto.\nEnglish: I have a new car.\n\n"
    "Translate German to English: Das Wetter ist heute sehr gut.\nEnglish:"
)
EXAMPLE_QUESTION = "Why is the sky blue?"
"""In place of `EXAMPLE_PROMPT` for a model that answers messages."""
CODE_PROMPT = 'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""\n'

_HELP = 'Text to answer or continue; "-" reads standard input (default: an example).'
PromptArgument = Annotated[str | None, typer.Argument(help=_HELP)]


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Read the prompt. "-" means standard input; so does no prompt when something is piped in.

    One newline at the end does not count. Raises ValueError for two sources, and one that is empty or not UTF-8; OSError.
    """
    if argument is not None and file is not None:
        raise ValueError("give a prompt or --file, not both")
    source = "standard input"
    if file is not None:
        source, text = str(file), _read(file, "give the path of")
    elif argument == "-" or (argument is None and _is_piped()):
        text = _decode(sys.stdin.buffer.read(), source)
    elif argument is None:
        return EXAMPLE_PROMPT
    elif any("\ud800" <= character <= "\udfff" for character in argument):  # Python's form of other bytes
        raise ValueError("the prompt is not UTF-8 text")
    else:
        return argument
    text = text.removesuffix("\n")
    if not text:
        raise ValueError(f"{source} is empty: put a prompt in it, or give one as an argument")
    return text


def read_copy_files(files: Sequence[Path] | None) -> list[str]:
    """Read the text of each file. Raises ValueError if one is empty or not UTF-8, OSError if it cannot be read."""
    texts = {path: _read(path, "--copy-from takes the path of") for path in files or ()}
    for path, text in texts.items():
        if not text:
            raise ValueError(f"{path} is empty: --copy-from takes a file with the text to copy from")
    return [*texts.values()]


def _is_piped() -> bool:
    """Return whether standard input is a pipe or a file, and not a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something without a descriptor
        return sys.stdin is not None and not sys.stdin.closed
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read(path: Path, wanted: str) -> str:
    try:
        return _decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}: {wanted} a UTF-8 text file") from None


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start})") from error
