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


def matching(lines: Iterable[Line], kind: str, **fields: Any) -> list[Line]:
    """The lines of a kind with these values."""
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
    broke off never replaces a complete record, and can be resumed. Of several processes that share a run, each writes a part
    of its own (PATH.part, PATH.part1, ..); the first one's becomes the record, so it is given everything by `complete` before
    it ends. The first process must enter the block before the others do: then, whenever they are killed, its part and those
    of the same attempt hold each line once.

    worker: number of this process. previous: lines of an earlier part to begin with. attempt: what tells the parts of this
    run from those that an earlier one left; the same in all its processes, needed where there are several or to resume.
    """

    def __init__(
        self, path: Path | None, *, worker: int = 0, previous: Sequence[Line] = (), attempt: str | None = None
    ) -> None:
        self.lines: list[Line] = [dict(line) for line in previous]
        self.path = path
        self._worker = worker
        self._attempt = attempt
        self._stream: TextIO | None = None

    def __enter__(self) -> RecordWriter:
        self._rewrite(self.lines, self._attempt)
        if self.path is not None and self._worker == 0:
            for part in _parts(self.path):
                if part != self._part:
                    part.unlink()  # left by an earlier run: what was wanted of it is in `previous`
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None and self.path is not None:
            if kind is None:
                os.fsync(self._stream.fileno())
            self._stream.close()
            if kind is None and self._worker == 0:
                self._part.replace(self.path)
            elif kind is None:
                self._part.unlink()

    @property
    def _part(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.part{self._worker or ''}")

    def complete(self, lines: Sequence[Line]) -> None:
        """All lines of the record, in place of those written so far."""
        self._rewrite(lines, None)

    def _rewrite(self, lines: Sequence[Line], attempt: str | None) -> None:
        self.lines = []
        if self.path is not None:
            if self._stream is not None:
                self._stream.close()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_name(f"{self._part.name}.new")
            self._stream = fresh.open("w", encoding="utf-8")
            if attempt is not None:
                self._stream.write(json.dumps({"kind": "part", "attempt": attempt}) + "\n")
            for line in lines:
                self.write(line)
            os.fsync(self._stream.fileno())
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
    """The lines of all parts that the last run to this path left when it broke off; a last line that is not whole is dropped.

    What an earlier run left is not taken: the first process's part says which attempt was the last.
    """
    lines: list[Line] = []
    last: str | None = None
    for number, part in enumerate(_parts(path)):
        found = _whole_lines(part)
        attempt = found.pop(0)["attempt"] if found and found[0]["kind"] == "part" else None
        if number == 0:
            last = attempt
            if part.name != f"{path.name}.part":
                return []
        if number == 0 or (attempt is not None and attempt == last):
            lines += found
    return lines


def _parts(path: Path) -> list[Path]:
    """The parts next to a record, by number."""
    beside = path.parent.glob(f"{path.name}.part*") if path.parent.is_dir() else ()
    numbers = {part: part.name.removeprefix(f"{path.name}.part") for part in beside}
    return sorted(
        (part for part, number in numbers.items() if number.isdecimal() or not number),
        key=lambda part: int(numbers[part] or 0),
    )


def _whole_lines(part: Path) -> list[Line]:
    lines: list[Line] = []
    for text in read_lines(part):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def read_record(path: Path) -> list[Line]:
    """The lines of a record, which may be packed (`gzip record.jsonl`).

    Raises ValueError, with the remedy, for a file that is not a record or cannot be read.
    """
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
    if lines and lines[0]["kind"] == "part":
        raise ValueError(f"{path} is what a run left when it broke off: finish it with --resume first")
    if not lines or lines[0]["kind"] != "run":
        raise ValueError(f'{path} is not a record of selfspec-bench: its first line is not of kind "run"')
    return lines


def is_quick(lines: Sequence[Line]) -> bool:
    """Whether a record was made with little work, to show that its command runs."""
    return bool(lines[0].get("provenance", {}).get("quick"))


def record_name(path: Path) -> str:
    """What a record is called: its file without `.jsonl` or `.jsonl.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


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
