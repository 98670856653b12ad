"""Measurement records: JSON lines, one object a line with a "kind".

The first line is the "run" (configuration, machine, versions); "sample" lines hold every raw time, "output" lines the
tokens and how they compare, "grid" and "cell" lines replays of fixed settings, "bar" lines what was asked for and reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

Line = dict[str, Any]


class RecordWriter:
    """Collects a run's lines and, if there is a path, writes them as they come.

    Used with `with`: lines go to PATH.part, which becomes PATH when the block ends without an error, so that a run that
    broke off never replaces a complete record, and can be resumed. Of several processes that share a run, each writes a part
    of its own (PATH.part, PATH.part1, ..); the first one's becomes the record, so it is given everything before it ends.

    worker: number of this process. previous: lines of an earlier part to begin with.
    """

    def __init__(self, path: Path | None, *, worker: int = 0, previous: Sequence[Line] = ()) -> None:
        self.lines: list[Line] = [dict(line) for line in previous]
        self._path = path
        self._worker = worker
        self._stream: TextIO | None = None

    def __enter__(self) -> RecordWriter:
        self.rewrite(self.lines)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None and self._path is not None:
            self._stream.close()
            if kind is None and self._worker == 0:
                self._part.replace(self._path)
            elif kind is None:
                self._part.unlink()

    @property
    def _part(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.part{self._worker or ''}")

    def rewrite(self, lines: Sequence[Line]) -> None:
        """Begin anew with these lines."""
        self.lines = []
        if self._path is not None:
            if self._stream is not None:
                self._stream.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_name(f"{self._part.name}.new")
            self._stream = fresh.open("w", encoding="utf-8")
            for line in lines:
                self.write(line)
            fresh.replace(self._part)  # at once: a kill in between loses nothing
        else:
            self.lines = [dict(line) for line in lines]

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; on disk at once."""
        self.lines.append(dict(line))
        if self._stream is not None:
            self._stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._stream.flush()


def read_parts(path: Path) -> list[Line]:
    """The lines of all parts that a run to this path left when it broke off; a last line that is not whole is dropped."""
    lines: list[Line] = []
    for part in sorted(path.parent.glob(f"{path.name}.part*")):
        if not part.name.endswith(".new"):
            for text in part.read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(text))
                except json.JSONDecodeError:
                    break
    return lines


def read_record(path: Path) -> list[Line]:
    """The lines of a record. Raises ValueError for a file that is none; OSError if it cannot be read."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a record of selfspec-bench: {error}") from None
    if not lines or not isinstance(lines[0], dict) or lines[0].get("kind") != "run":
        raise ValueError(f'{path} is not a record of selfspec-bench: its first line is not of kind "run"')
    return lines
