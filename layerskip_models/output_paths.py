"""Where results are written: folders are made, and a path that cannot be written is refused before any work is done."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile


def output_file(path: Path, *, replaced: bool = False) -> Path:
    """Make the folders above a file that is to be written, check that it can be, and return its path.

    replaced: the file is written under another name and then renamed, which a device or a pipe would not survive.
    Raises ValueError, in one line, for a path that cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; name a file in it")
    if path.exists() and not path.is_file():  # a device, a pipe
        if replaced or not os.access(path, os.W_OK):
            raise ValueError(f"cannot write {path}: it is not a regular file; choose another path")
        return path
    _make_folder(path.parent, path)
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"cannot write {path}: permission denied; choose another path")
    return path


def output_folder(path: Path) -> Path:
    """Make a folder for results, check that files can be written there, and return its path. Raises as `output_file`."""
    _make_folder(path, path)
    return path


def _make_folder(folder: Path, wanted: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {wanted}: {error.strerror or error}; choose another path") from None
