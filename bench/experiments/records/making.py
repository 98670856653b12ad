"""Makes records one after the other: what is complete stays, what broke off is taken up, what cannot be made is named.

Quick records, whose times nobody reads, share the cores.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from bench.datasets import load_prompts
from bench.experiments.records.record_table import (
    FILES,
    PACKAGES,
    QUICK_CHATS,
    QUICK_MINUTES,
    QUICK_TEXT,
    WORK,
    RecordSource,
    program_words,
)
from bench.provenance import QUICK_VARIABLE, git_commit
from bench.record import Line, read_parts, read_record
from bench.sources import ROOT, sources
from layerskip_models.checkpoints.named_models import NAMED_MODELS, named_file
from layerskip_models.kernels.threads import usable
from layerskip_models.training.documents import END_OF_TEXT

_MOST_AT_ONCE = 4
_COPIES = 50
_SAID = 200  # characters of what a command says when it fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What is measured. commit: with "+changes" where files differ from it, None without git. parts: digests by part."""

    commit: str | None
    parts: Mapping[str, str]

    @classmethod
    def here(cls) -> Code:
        """The checkout that this file is in."""
        return cls(commit=git_commit(ROOT), parts=sources() or {})

    @property
    def key(self) -> str:
        """12 hexadecimal digits that another state of the code does not have."""
        return sha256(json.dumps([self.commit, self.parts]).encode()).hexdigest()[:12]

    def made(self, first: Line) -> bool:
        """Whether a record with this first line is of this code."""
        where = first["provenance"]
        return bool(where.get("commit") == self.commit and where.get("sources") == self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a record. what: in words; failed: its command did not end well; seconds: that the command took."""

    what: str
    failed: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Where records are made and from what.

    output_dir: a folder, for NAME.jsonl of each record, `logs` and `work`. quick: with little work, to show that commands
    run. files: the user's folder of prompts, texts and checkpoints, None without. code: all records are of this one.
    """

    output_dir: Path
    quick: bool
    files: Path | None
    code: Code
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def at_once(self) -> int:
        """Commands that run side by side."""
        return min(_MOST_AT_ONCE, usable().processors) if self.quick else 1

    def stop(self) -> None:
        """End the commands that run, and begin no other."""
        self.stopped.set()
        for process in list(self.running):
            process.terminate()
            process.wait()

    def path(self, source: RecordSource) -> Path:
        """Where the record is written."""
        return self.output_dir / f"{source.name}.jsonl"

    def work(self, source: RecordSource) -> Path:
        """Where a study keeps what it trains: what another state of the code trained is not used."""
        return self.output_dir / "work" / f"{source.name}-{self.code.key}"

    def is_complete(self, source: RecordSource) -> bool:
        """Whether the record is there, whole, of this code and as quick as this one would be."""
        try:
            first = read_record(self.path(source))[0]
        except ValueError:
            return False
        return self.code.made(first) and first["provenance"].get("quick", False) == self.quick

    def obstacle(self, source: RecordSource) -> str | None:
        """Why the record cannot be made here, and what to do; None if it can."""
        needed = source.modules if self.quick else (*source.modules, *source.peers)
        packages = _not_installed(needed)
        if packages:
            return f"needs {' and '.join(packages)}: pip install {' '.join(packages)}"
        for name in NAMED_MODELS.keys() & set(source.words(quick=self.quick)):
            try:
                named_file(name)
            except FileNotFoundError as error:
                return str(error)
        names = source.files(quick=self.quick)
        if self.files is None and names:
            return f"needs --files FOLDER with {', '.join(names)}"
        missing = [name for name in names if self.files is not None and not (self.files / name).exists()]
        return f"{', '.join(missing)}: not in {self.files}" if missing else None

    def command(self, source: RecordSource) -> list[str]:
        """The whole command line. A command that can goes on with what it left of the same code."""
        place = self.work(source) if source.output_option == "--output-dir" else self.path(source)
        words = [*self._placed(source, source.words(quick=self.quick)), source.output_option, str(place)]
        parts = read_parts(self.path(source)) if source.resumes else []
        going_on = bool(parts) and parts[0]["kind"] == "run" and self.code.made(parts[0])
        return [sys.executable, "-m", *words, *(["--resume"] if going_on else [])]

    def make(self, source: RecordSource) -> Outcome:
        """Run the record's command; what it says goes to logs/NAME.log."""
        work, path = self.work(source), self.path(source)
        work.mkdir(parents=True, exist_ok=True)
        began = perf_counter()
        if self.quick:
            _write_texts(work / Path(QUICK_TEXT).parent.name)
            if source.before is not None:
                before = [sys.executable, "-m", *self._placed(source, program_words(source.before))]
                status, last = self._run(source, before)
                if status:
                    return Outcome(what=f"failed before it: {last}", failed=True, seconds=perf_counter() - began)
        status, last = self._run(source, self.command(source))
        if source.output_option == "--output-dir":
            for written in work.glob("*.jsonl"):
                written.replace(path)
        seconds = perf_counter() - began
        if not self.is_complete(source):
            what = (
                f"failed with status {status}: {last}" if status else f"its command left no record of this code: {last}"
            )
            return Outcome(what=what, failed=True, seconds=seconds)
        if status:
            return Outcome(what=f"made, but its command failed: {last}", failed=True, seconds=seconds)
        without = _not_installed(source.peers)
        if self.quick:
            shutil.rmtree(work)
        return Outcome(what=f"made without {', '.join(without)}" if without else "made", seconds=seconds)

    def _placed(self, source: RecordSource, words: Iterable[str]) -> list[str]:
        places = {FILES: self.files, WORK: self.work(source)}
        return [_place(word, places) for word in words]

    def _run(self, source: RecordSource, command: Sequence[str]) -> tuple[int, str]:
        """Its exit status, and the last line that it said."""
        log = self.output_dir / "logs" / f"{source.name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as stream:
            began = stream.tell()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **({QUICK_VARIABLE: "1", "OMP_NUM_THREADS": "1"} if self.quick else {})},
            )
            self.running.append(process)
            try:
                if self.stopped.is_set():  # just before it was among those that run
                    process.terminate()
                status = process.wait()
            except BaseException:
                self.stop()
                raise
            finally:
                self.running.remove(process)
        said = log.read_bytes()[began:].decode(errors="replace").strip().splitlines()
        return status, said[-1][:_SAID] if said else "it said nothing"


def make_all(
    maker: Maker, chosen: Sequence[RecordSource], outcomes: dict[str, Outcome], tell: Callable[[str], None]
) -> None:
    """Make the records that are not there yet. outcomes: filled in as they come, by name.

    tell: is given a line before and after each. Raises ValueError where the code becomes another one meanwhile.
    """
    left: list[RecordSource] = []
    for source in chosen:
        reason = maker.obstacle(source)
        if maker.is_complete(source):
            outcomes[source.name] = Outcome(what="complete already")
        elif reason is not None:
            outcomes[source.name] = Outcome(what=f"skipped: {reason}")
        else:
            left.append(source)
    planned = spent = 0.0
    at_once = min(maker.at_once, len(left))

    def make_one(number: int, source: RecordSource) -> None:
        nonlocal planned, spent
        if maker.stopped.is_set():
            return
        if git_commit(ROOT) != maker.code.commit:
            raise ValueError(
                f"the code is no longer that of {maker.code.commit}, of which the other records are: start again to make all "
                "of them at one commit"
            )
        pace = spent / planned if planned else 1.0
        rest = pace * sum(minutes_of(other, maker.quick) for other in left[number - 1 :]) / at_once
        own = pace * minutes_of(source, maker.quick)
        tell(f"[{number}/{len(left)}] {source.name}: about {duration(own)}; {duration(rest)} left for all")
        made = maker.make(source)
        if maker.stopped.is_set():
            return
        outcomes[source.name] = made
        tell(f"    {source.name}: {made.what}, {duration(made.seconds / 60)}")
        planned += minutes_of(source, maker.quick)
        spent += made.seconds / 60

    if at_once <= 1:
        for number, source in enumerate(left, start=1):
            make_one(number, source)
        return
    with ThreadPoolExecutor(at_once) as threads:
        made = [threads.submit(make_one, number, source) for number, source in enumerate(left, start=1)]
        try:
            for one in as_completed(made):
                one.result()
        except BaseException:
            maker.stop()
            raise


def keep(maker: Maker, source: RecordSource) -> Path:
    """Pack a record into its place in the repository, and return that."""
    target = ROOT / source.folder / f"{source.name}.jsonl.gz"
    target.write_bytes(gzip.compress(maker.path(source).read_bytes(), mtime=0))
    return target


def minutes_of(source: RecordSource, quick: bool) -> float:
    """About how long it takes."""
    return QUICK_MINUTES if quick else source.minutes


def duration(minutes: float) -> str:
    """In seconds, minutes or hours, whichever are read best."""
    if minutes < 2:
        return f"{60 * minutes:.0f} s"
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _not_installed(modules: Iterable[str]) -> list[str]:
    return [PACKAGES[module] for module in modules if find_spec(module) is None]


def _place(word: str, places: Mapping[str, Path | None]) -> str:
    """A word of a command with the folder that its first part stands for."""
    first, slash, rest = word.partition("/")
    folder = places.get(first)
    return word if folder is None else f"{folder}{slash}{rest}"


def _write_texts(folder: Path) -> None:
    """The shipped prompts as text to train on, and as chats. Of many numbered copies some are held out."""
    folder.mkdir(exist_ok=True)
    prompts = [prompt.prompt for prompt in load_prompts()]
    documents = (f"{number}. {text}" for number in range(1, _COPIES + 1) for text in prompts)
    (folder / Path(QUICK_TEXT).name).write_text(f"\n{END_OF_TEXT}\n".join(documents), encoding="utf-8")
    chats = ({"messages": [{"role": "user", "content": text}]} for text in prompts)
    (folder / Path(QUICK_CHATS).name).write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
