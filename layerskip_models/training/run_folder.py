"""The folder of a training run: claimed by one set of options, written so that a kill at any moment leaves it whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from layerskip_models.output_paths import output_folder
from layerskip_models.text_files import read_lines, write_text
from layerskip_models.training.settings import RunSettings

PREFIX = "step-"


def claim_output_dir(settings: RunSettings) -> Path:
    """Make output_dir and record the settings in it, or find the same ones there (a run to resume).

    A run with other settings that failed before it had any of `settings.results` is replaced, and what it prepared is
    deleted, since other settings would prepare something else. A setting that is younger than the recorded run had its
    default there. One that exists no more is left to the run's checkpoint, which fits only if it had its default.
    Raises ValueError when the folder holds a run with other settings, or something else.
    """
    output_dir = Path(settings.output_dir)
    recorded_path = output_dir / "config.json"
    mine = json.loads(json.dumps(asdict(settings)))
    if recorded_path.exists():
        defaults = {item.name: item.default for item in fields(settings) if item.default is not MISSING}
        recorded = json.loads(json.dumps(defaults)) | json.loads(recorded_path.read_text(encoding="utf-8"))
        changed = sorted(name for name in mine if name not in settings.operational and mine[name] != recorded.get(name))
        if not changed:
            return output_dir
        if any((output_dir / name).exists() for name in settings.results):
            raise ValueError(
                f"output_dir {settings.output_dir!r} holds a run with another {', '.join(changed)}:"
                " choose another output_dir, or repeat that run's options to resume it"
            )
        for path in (output_dir / name for name in settings.preparation):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    elif output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(f"output_dir {settings.output_dir!r} exists and holds no training run: choose another")
    output_folder(output_dir)
    write_text(recorded_path, json.dumps(mine, indent=1) + "\n")
    return output_dir


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new folder, then put it in the place of `path`.

    A kill at any moment leaves either the old folder, the new one, or (between two renames) the old one under a name
    that starts with a dot; never a part of a folder under `path`.
    """
    temporary = path.with_name(f".{path.name}.writing")
    retired = path.with_name(f".{path.name}.old")
    for leftover in (temporary, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    for file in temporary.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    if path.exists():
        path.rename(retired)
    temporary.rename(path)
    shutil.rmtree(retired, ignore_errors=True)


def latest_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """Find the newest complete checkpoint and its number of steps, or None."""
    found = sorted(folder.glob(f"{PREFIX}*")) if folder.is_dir() else []
    return (found[-1], int(found[-1].name.removeprefix(PREFIX))) if found else None


def rewind_log(path: Path, step: int) -> None:
    """Drop the lines of a JSON-lines log that belong to steps after `step`: a resumed run writes them again."""
    kept = []
    for line in read_lines(path) if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # a line cut short by the kill
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    write_text(path, "".join(kept))
