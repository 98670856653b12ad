"""Training checkpoints on disk: written whole or not at all, and found again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from layerskip_models.text_files import read_lines, write_text

PREFIX = "step-"


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, flush it to the disk and rename it to `path`, replacing what is there.

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


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all."""
    temporary = path.with_suffix(".writing")
    save_file(tensors, temporary)
    temporary.replace(path)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return folder / f"{PREFIX}{step:08d}"


def latest_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """Find the newest complete checkpoint and its number of steps, or None."""
    found = sorted(folder.glob(f"{PREFIX}*")) if folder.is_dir() else []
    return (found[-1], int(found[-1].name.removeprefix(PREFIX))) if found else None


def drop_old_checkpoints(folder: Path, keep: int = 1) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for path in sorted(folder.glob(f"{PREFIX}*"))[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def rewind_log(path: Path, step: int) -> None:
    """Drop the lines of a JSON-lines log that belong to steps after `step`: a resumed run writes them again."""
    if not path.exists():
        return
    kept = []
    for line in read_lines(path):
        try:
            record: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line cut short by the kill
        if record["step"] <= step:
            kept.append(line + "\n")
    write_text(path, "".join(kept))
