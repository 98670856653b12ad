"""Where the command line takes its prompt from: an argument, a file, standard input, or a built-in example."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE_PROMPT = (
    "Translate German to English: Ich habe ein neues Auto.\nEnglish: I have a new car.\n\n"
    "Translate German to English: Das Wetter ist heute sehr gut.\nEnglish:"
)
"""The default prompt."""
CODE_PROMPT = 'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""\n'
"""A second example: code."""


PromptArgument = Annotated[
    str | None, typer.Argument(help='Text to continue; "-" reads standard input (default: an example).')
]


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt. "-" means standard input; so does no prompt when something is piped in.

    Files and standard input are UTF-8; one newline at the end does not count. Raises ValueError if two sources are given, or
    if one is empty or not UTF-8; OSError if the file cannot be read.
    """
    if argument is not None and file is not None:
        raise ValueError("give a prompt or --file, not both")
    if file is not None:
        try:
            return _prompt(file.read_bytes(), str(file))
        except FileNotFoundError:
            raise FileNotFoundError(f"no file {file}: give the path of a UTF-8 text file") from None
    if argument == "-" or (argument is None and _is_piped()):
        return _prompt(sys.stdin.buffer.read(), "standard input")
    if argument is None:
        return EXAMPLE_PROMPT
    if any("\ud800" <= character <= "\udfff" for character in argument):  # Python's form of other bytes
        raise ValueError("the prompt is not UTF-8 text")
    return argument


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, and not a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something without a descriptor
        return sys.stdin is not None and not sys.stdin.closed
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def decode(content: bytes, source: str) -> str:
    """UTF-8 text with Unix line ends. Raises ValueError that names the source."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start})") from error


def _prompt(content: bytes, source: str) -> str:
    text = decode(content, source).removesuffix("\n")
    if not text:
        raise ValueError(f"{source} is empty: put a prompt in it, or give one as an argument")
    return text
