"""Which safetensors files a checkpoint's weights are read from.

The choice is transformers' own: `model.safetensors` if there is one, else all that `model.safetensors.index.json` names,
whatever else lies in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_KIND = ".safetensors"
_AGAIN = "copy or download it again"


def tensor_files(name: str, origin: Mapping[str, Any]) -> dict[str, Path]:
    """Find the file of every tensor of a checkpoint. name: a folder or hub name. origin: revision and local_files_only.

    Raises FileNotFoundError or OSError for files that are missing or damaged, and names them.
    """
    where: dict[str, Path] = {}
    files, listed = files_of(name, origin)
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                where.update(dict.fromkeys(file.keys(), path))
        except SafetensorError as error:
            raise OSError(f"{path} is incomplete or damaged ({error}): {_AGAIN}") from error
    if lost := sorted(listed - where.keys()):
        raise OSError(f"{name} lacks {lost[0]}, which its {INDEX} lists, and {len(lost)} in all: {_AGAIN}")
    return where


def files_of(name: str, origin: Mapping[str, Any]) -> tuple[list[Path], set[str]]:
    """Find the files, and the tensors that an index lists (none without one); later files go before earlier ones.

    Raises FileNotFoundError for one that is missing, OSError for a damaged index.
    """

    from transformers.utils import cached_file

    def find(file: str) -> Path | None:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **origin)
        return None if found is None else Path(str(found))

    if (single := find(FILE)) is not None:
        return [single], set()
    if (index := find(INDEX)) is None:
        raise FileNotFoundError(
            f"{name} has no {FILE}: only safetensors files are loaded; save the model with save_pretrained(), or copy the "
            "file there"
        )
    listed = listed_files(index)
    paths = []
    for file in sorted({*listed.values()}):
        if (path := find(file)) is None:
            raise FileNotFoundError(f"{name} has no {file}, which its {INDEX} names: copy the file there")
        paths.append(path)
    return paths, {*listed}


def listed_files(index: Path) -> dict[str, str]:
    """Read the file of every tensor that an index lists. OSError for one that cannot be read."""
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
        listed = {str(tensor): str(file) for tensor, file in said["weight_map"].items()}
        whole = isinstance(said["metadata"], dict) and bool(listed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(f"{index} is damaged ({type(error).__name__}: {error}): {_AGAIN}") from error
    if not whole:
        raise OSError(f"{index} is damaged (it lists nothing): {_AGAIN}")
    if foreign := sorted(file for file in listed.values() if Path(file).name != file or not file.endswith(_KIND)):
        raise OSError(f"{index} names {foreign[0]}, which is not a safetensors file beside it: {_AGAIN}")
    return listed
