"""Time from the start of a process to its first token, by stage, cold and warm, beside transformers' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from bench.record import Line
from bench.report.table import UNKNOWN, Table, counted, number

ENGINES = ("selfspec", "transformers")
STAGES = ("interpreter", "imports", "loading", "layout", "calibration", "prefill")
"""interpreter: until Python runs. loading: weights and tokenizer. layout: choosing and making the layout of the weights that
decoding is fast with. calibration: timing the default policy's costs. prefill: from the call to its first token."""
SECOND = "second call"
"""From a second call in the same process to its first token; not part of the start."""
_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "accelerate",
    "selfspec",
    "layerskip_models",
    "policies",
)


def forget_files(folders: Iterable[Path]) -> int:
    """Ask the operating system to drop these folders' files from its memory. Returns bytes of the files asked for.

    What another living process has mapped stays. Does nothing where the system has no such call.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    total = 0
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                total += file.stat().st_size
    return total


def start_folders(checkpoint: str) -> list[Path]:
    """Where a start reads from: the checkpoint, if it is local, and the packages."""
    folders = [Path(checkpoint)] if Path(checkpoint).is_dir() else []
    for name in _PACKAGES:
        spec = find_spec(name)
        folders += [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return folders


def start(job: Mapping[str, Any]) -> dict[str, float]:
    """Start a process that does the job, and return seconds by stage. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "bench.machine.startup_child"]
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [*command, repr(time.time()), json.dumps(job)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if result.returncode:
        raise RuntimeError(f"starting {job['engine']} failed:\n{result.stderr.strip()}")
    seconds: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return seconds


def startup_headline(lines: Sequence[Line]) -> str:
    """How long a start takes."""
    configuration, where = lines[0]["configuration"], lines[0]["provenance"]
    model = configuration["model"]
    device = where["cpu"] if where["device"] == "cpu" else where["device"]
    totals = {(engine, cold): _total(lines, engine, cold) for engine in ENGINES for cold in (True, False)}
    return (
        f"{model[0].upper()}{model[1:]} in {where['dtype']} on {device}, {counted(where['threads'], 'thread')}, a prompt of "
        f"{configuration['prompt_tokens']} tokens: from the start of the process to its first token "
        f"{totals['selfspec', True]:.1f} s cold and {totals['selfspec', False]:.1f} s warm (transformers "
        f"{totals['transformers', True]:.1f} and {totals['transformers', False]:.1f})."
    )


def startup_tables(lines: Sequence[Line]) -> list[Table]:
    """One: a row per engine and state of the file cache."""
    rows = []
    for engine in ENGINES:
        for cold in (True, False):
            runs = _runs(lines, engine, cold)
            cells = [_stage(runs, stage) for stage in STAGES]
            rows.append(
                (
                    f"{engine}, {'cold' if cold else 'warm'}",
                    *(UNKNOWN if value is None else f"{value:.2f}" for value in cells),
                    f"{_total(lines, engine, cold):.2f}",
                    number(_stage(runs, SECOND), "{:.3f}"),
                )
            )
    title = (
        "Seconds from the start of a process to its first token, by stage; last, to the first token of a second call"
    )
    return [Table(name="startup", title=title, columns=("engine", *STAGES, "first token", SECOND), rows=tuple(rows))]


def _runs(lines: Sequence[Line], engine: str, cold: bool) -> list[Line]:
    return [line for line in lines if line["kind"] == "start" and (line["engine"], line["cold"]) == (engine, cold)]


def _stage(runs: Sequence[Line], stage: str) -> float | None:
    known = [run["seconds"][stage] for run in runs if stage in run["seconds"]]
    return median(known) if known else None


def _total(lines: Sequence[Line], engine: str, cold: bool) -> float:
    return median(
        sum(value for stage, value in run["seconds"].items() if stage != SECOND) for run in _runs(lines, engine, cold)
    )
