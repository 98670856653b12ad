"""Text files that people care about: replaced whole or not at all, and read line by line even if one line was cut short."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


def write_text(path: Path, text: str) -> None:
    """Replace a file, or make it. A kill, a crash or a full disk at any moment leaves the old file or the new one.

    Raises OSError, and leaves the old file as it was. A device or a pipe is not replaced, but is such an error.
    """
    target = Path(os.path.realpath(path))  # what a link points to is replaced, not the link
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is not a regular file: choose another path")
    temporary = target.with_name(f".{target.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # so that the new name survives a power cut; where folders can be opened
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_text(path: Path) -> TextIO:
    """Open a UTF-8 file, packed if its name ends in .gz. Only a line feed ends a line."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    return path.open(encoding="utf-8-sig", newline="\n")


def json_lines(path: Path, expected: str = "an object") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object of each line of a .jsonl or .jsonl.gz file, after its place. Raises ValueError for anything else.

    expected: what the error asks for.
    """
    with open_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place}: not JSON ({error})") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{place}: expected {expected}")
            yield place, fields


def read_lines(path: Path) -> list[str]:
    """Read a file's lines without their ends, as JSON lines and `wc` count them: only a line feed ends a line.

    A byte order mark at the beginning is left out. Raises UnicodeDecodeError for what is not UTF-8, but for a last line that
    was cut short within a character.
    """
    return split_lines(path.read_bytes())


def split_lines(data: bytes) -> list[str]:
    """As `read_lines`, of a file's bytes."""
    whole, feed, last = data.removeprefix(b"\xef\xbb\xbf").rpartition(b"\n")
    lines = [line.removesuffix("\r") for line in (whole + feed).decode("utf-8").split("\n")]
    return [*lines[:-1], *([last.decode("utf-8", errors="replace")] if last else [])]


def cut_last_line(path: Path) -> None:
    """Remove what follows the last line feed, a line that was cut short. What is before it is not written again."""
    with path.open("rb+") as stream:
        stream.truncate(stream.read().rfind(b"\n") + 1)


def in_a_line(error: BaseException) -> str:
    """Write an error's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
