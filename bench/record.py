"""Measurement records: JSON lines, one object a line with a "kind".

The first line is the "run" (configuration, machine, versions); "sample" lines hold every raw time, "output" lines the
tokens and how they compare, "grid" and "cell" lines replays of fixed settings.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from layerskip_models.text_files import read_lines, split_lines

Line = dict[str, Any]
KEPT = ":kept"
"""Ends the name of an engine whose policy goes on learning from prompt to prompt."""
PLAIN = "selfspec:ar"
"""The engine that decodes without speculation."""
BEST_FIXED = "selfspec:best-fixed"
"""The engine that runs, for each task, the fixed setting that replay with measured costs finds best on its prompts."""
BEST_FIXED_LABEL = "selfspec, oracle per task"
_PART = ".part"


def matching(lines: Iterable[Line], kind: str, **fields: Any) -> list[Line]:
    """Return the lines of a kind with these values."""
    return [line for line in lines if line["kind"] == kind and all(line[name] == fields[name] for name in fields)]


def by_value(lines: Iterable[Line], name: str) -> dict[Any, list[Line]]:
    """Lines by the value of one of their fields, in their order."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(line[name], []).append(line)
    return found


class RecordWriter:
    """Collects a run's lines and, if there is a path, writes them as they come.

    Used with `with`: lines go to PATH.part, which becomes PATH when the block ends without an error, so that a run that
    broke off never replaces a complete record, and can be resumed.

    previous: lines to begin with, such as a run left that broke off. `earlier` finds what they have measured.
    """

    def __init__(self, path: Path | None, *, previous: Sequence[Line] = ()) -> None:
        self.lines: list[Line] = [dict(line) for line in previous]
        self.path = path
        self._earlier = list(self.lines)
        self._stream: TextIO | None = None

    def __enter__(self) -> RecordWriter:
        self.complete(self.lines)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None and self.path is not None:
            if kind is None:
                os.fsync(self._stream.fileno())
            self._stream.close()
            if kind is None:
                part_of(self.path).replace(self.path)

    def earlier(self, kind: str, **fields: Any) -> Line | None:
        """Find a line with these values that this run began with; None for what is still to be measured."""
        return next(iter(matching(self._earlier, kind, **fields)), None)

    def complete(self, lines: Sequence[Line]) -> None:
        """All lines of the record, in place of those written so far."""
        self.lines = []
        if self.path is None:
            self.lines = [dict(line) for line in lines]
            return
        if self._stream is not None:
            self._stream.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = part_of(self.path)
        fresh = part.with_name(f"{part.name}.new")
        self._stream = fresh.open("w", encoding="utf-8")
        for line in lines:
            self.write(line)
        os.fsync(self._stream.fileno())
        fresh.replace(part)  # at once: a kill in between loses nothing

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; on disk at once."""
        self.lines.append(dict(line))
        if self._stream is not None:
            self._stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._stream.flush()


def part_of(path: Path) -> Path:
    """Where the lines of a record are while it is measured."""
    return path.with_name(f"{path.name}{_PART}")


def read_part(path: Path) -> list[Line]:
    """Read the lines that a run to this path left when it broke off; a last line that is not whole is dropped."""
    part, lines = part_of(path), []
    for text in read_lines(part) if part.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def read_record(path: Path) -> list[Line]:
    """Read the lines of a record, which may be packed (`gzip record.jsonl`).

    Raises ValueError, with the remedy, for a file that is not a record or cannot be read.
    """
    if path.name.endswith(_PART):
        raise ValueError(f"{path} is what a run left when it broke off: finish it with --resume first")
    if not path.exists():
        raise ValueError(f"there is no record at {path}: measure one with selfspec-bench run --output {path}")
    try:
        rows = split_lines(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except (EOFError, zlib.error):
        raise ValueError(f"cannot read the record {path}: it is cut off or damaged") from None
    except OSError as error:
        raise ValueError(f"cannot read the record {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a record of selfspec-bench: it is not text") from None
    lines = []
    for number, row in enumerate(rows, start=1):
        if row.strip():
            try:
                line = json.loads(row)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} is not a record of selfspec-bench, or a damaged one: line {number} is not JSON ({error})"
                ) from None
            if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
                raise ValueError(f'{path} is not a record of selfspec-bench: line {number} is no object with a "kind"')
            lines.append(line)
    if not lines or lines[0]["kind"] != "run":
        raise ValueError(f'{path} is not a record of selfspec-bench: its first line is not of kind "run"')
    return lines


@contextmanager
def showing(path: Path) -> Iterator[None]:
    """Within it, a line or field that a record lacks becomes a ValueError which names the record and the remedy."""
    try:
        yield
    except (LookupError, StopIteration, TypeError, ZeroDivisionError) as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ValueError(
            f"{path} lacks lines or fields that its tables need ({what}); it is damaged or of another version: measure again"
        ) from error
