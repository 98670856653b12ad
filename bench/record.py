"""Measurement records: JSON lines, one object a line with a "kind".

The first line, "run", is the header: what was asked for, machine, versions, commit and command. A line follows for everything
that is measured, with its raw times, as soon as it is known; "end" is the last one. A command that broke off goes on where it
stopped when it is given again with the same --output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from layerskip_models.text_files import cut_last_line, read_lines

Line = dict[str, Any]
WARMED_UP = ":warmed-up"
"""Ends the name of an engine whose policy goes on learning from prompt to prompt."""
PLAIN = "selfspec:ar"
"""The engine that decodes without speculation."""
_SAME = ("commit", "cpu", "device", "threads", "dtype", "torch")
"""What a run that goes on must have in common with its beginning, besides its configuration."""


def matching(lines: Iterable[Line], kind: str, **fields: Any) -> list[Line]:
    """Return the lines of a kind with these values."""
    return [line for line in lines if line["kind"] == kind and all(line.get(name) == fields[name] for name in fields)]


def by_value(lines: Iterable[Line], name: str) -> dict[Any, list[Line]]:
    """Group lines by the value of one of their fields, in their order."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(line[name], []).append(line)
    return found


def engine_labels(lines: Iterable[Line]) -> dict[str, str]:
    """Return what tables call each engine of a record, by its name."""
    return {line["engine"]: line["label"] for line in matching(lines, "engine")}


class Record:
    """Collects the lines of one run and, if there is a path, writes each at once. Used with `with`, which ends the record.

    header: the first line. If the file is there, it must have begun with the same configuration, commit and machine; what it
    holds is not measured again. Raises ValueError if it holds another run.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path = path
        self._stream: TextIO | None = None
        has_text = path is not None and path.exists() and path.stat().st_size > 0
        self.lines = _whole_lines(path) if has_text else []  # type: ignore[arg-type]
        if self.lines:
            before, now = self.lines[0], json.loads(json.dumps(header))
            changed = [] if before.get("command") == now["command"] else ["command"]
            changed += [name for name, _, _ in differences(before, now, _SAME)]
            if changed:
                another = ", ".join(changed)
                raise ValueError(f"{path} holds a run with another {another}: remove it, or name another --output")
        self.num_earlier = len(self.lines)
        if not self.lines:
            self.lines = [dict(header)]

    def __enter__(self) -> Record:
        if self.path is not None and not self.is_complete:
            if self.num_earlier:
                cut_last_line(self.path)
            self._stream = self.path.open("a", encoding="utf-8")
            for line in self.lines[self.num_earlier :]:
                self._put(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self.is_complete:
            self.write("end")
        if self._stream is not None:
            os.fsync(self._stream.fileno())
            self._stream.close()

    @property
    def is_complete(self) -> bool:
        """Tell whether the run came to its end, now or when it was given before."""
        return bool(self.lines[-1]["kind"] == "end")

    def find(self, kind: str, **key: Any) -> Line | None:
        """Return the line with these values; None for what is still to be measured."""
        return next(iter(matching(self.lines, kind, **key)), None)

    def once(self, kind: str, make: Callable[[], Mapping[str, Any]], **key: Any) -> Line:
        """Return the line with these values. If it is not there, measure the rest of it and write it."""
        line = self.find(kind, **key)
        return self.write(kind, **key, **make()) if line is None else line

    def write(self, kind: str, **fields: Any) -> Line:
        """Add a line; it is on disk at once."""
        line = {"kind": kind, **fields}
        self.lines.append(line)
        self._put(line)
        return line

    def _put(self, line: Line) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._stream.flush()


def differences(before: Line, after: Line, provenance: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what two headers say otherwise, with both values. provenance: the names that count of where they were made."""
    for part, chosen in (("configuration", None), ("provenance", provenance)):
        old, new = before.get(part, {}), after[part]
        for name in chosen or sorted({*old, *new}):
            if old.get(name) != new.get(name):
                yield name, old.get(name), new.get(name)


def _whole_lines(path: Path) -> list[Line]:
    """Read what a run wrote; a last line that was cut short is left out. Raises ValueError if that is no record."""
    lines: list[Line] = []
    rows = [row for row in read_lines(path) if row.strip()]
    for number, row in enumerate(rows, start=1):
        try:
            line = json.loads(row)
        except json.JSONDecodeError as error:
            if number == len(rows) > 1:
                break
            raise ValueError(f"{path} is not a record of selfspec-bench: line {number} is not JSON ({error})") from None
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            raise ValueError(f'{path} is not a record of selfspec-bench: line {number} is no object with a "kind"')
        lines.append(line)
    if not lines or lines[0]["kind"] != "run":
        raise ValueError(f'{path} is not a record of selfspec-bench: its first line is not of kind "run"')
    return lines


def read_record(path: Path) -> list[Line]:
    """Read the lines of a complete record, without the last. Raises ValueError, with the remedy, for anything else."""
    if not path.exists():
        raise ValueError(f"there is no record at {path}: measure one with selfspec-bench run --output {path}")
    try:
        lines = _whole_lines(path)
    except OSError as error:
        raise ValueError(f"cannot read the record {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a record of selfspec-bench: it is not text") from None
    if lines[-1]["kind"] != "end":
        raise ValueError(f"{path} is of a run that broke off: give its command again, and it goes on")
    return lines[:-1]


@contextmanager
def showing(path: Path) -> Iterator[None]:
    """Within it, a line or field that a record lacks becomes a ValueError which names the record and the remedy."""
    try:
        yield
    except (LookupError, StopIteration, TypeError, ZeroDivisionError) as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        why = f"it is damaged or of another version ({what}): measure again"
        raise ValueError(f"{path} lacks lines or fields that its tables need; {why}") from error
