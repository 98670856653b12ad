"""Measurement records: JSON lines, one object a line with a "kind".

The first line is the "run" (configuration, machine, versions); "sample" lines hold every raw time, "output" lines the
tokens and how they compare, "cell" lines a sweep's replays, "bar" lines what was asked for and reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

Line = dict[str, Any]


class RecordWriter:
    """Collects a run's lines and, if there is a path, writes them as they come.

    Used with `with`: lines go to PATH.part, which becomes PATH when the block ends without an error, so that a run that
    broke off never replaces a complete record.
    """

    def __init__(self, path: Path | None) -> None:
        self.lines: list[Line] = []
        self._path = path
        self._stream: TextIO | None = None

    def __enter__(self) -> RecordWriter:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._part.open("w", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None and self._path is not None:
            self._stream.close()
            if kind is None:
                self._part.replace(self._path)

    @property
    def _part(self) -> Path:
        assert self._path is not None
        return self._path.with_name(self._path.name + ".part")

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; on disk at once."""
        self.lines.append(dict(line))
        if self._stream is not None:
            self._stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._stream.flush()


def read_record(path: Path) -> list[Line]:
    """The lines of a record. Raises ValueError for a file that is none; OSError if it cannot be read."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a record of selfspec-bench: {error}") from None
    if not lines or not isinstance(lines[0], dict) or lines[0].get("kind") != "run":
        raise ValueError(f'{path} is not a record of selfspec-bench: its first line is not of kind "run"')
    return lines
