"""Which safetensors files a checkpoint's weights are read from, and the tensors in them.

The choice is transformers' own: `model.safetensors` if there is one, else all that `model.safetensors.index.json` names,
whatever else lies in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from layerskip_models.checkpoints.packed_weights import modules_of

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_KIND = ".safetensors"
_FLOATS = ("F16", "BF16", "F32", "F64")
_AGAIN = "copy or download it again"


class Tensors:
    """The tensors of a checkpoint's safetensors files, opened once and mapped, not read.

    name: of the checkpoint. where: the file of every tensor.
    """

    def __init__(self, name: str, where: Mapping[str, Path]) -> None:
        self.name, self.where = name, where
        self._open: dict[Path, Any] = {}

    def part(self, name: str) -> Any:
        """A slice of an open file, of which all (`[...]`) or parts can be read. ValueError for a tensor that is not there."""
        path = self.where.get(name)
        if path is None:
            raise ValueError(
                f"{self.name} lacks weights of the model, first {name}: it is not complete, or another model"
            )
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_slice(name)

    def check_floats(self) -> None:
        """ValueError if weights are quantised, which the caller takes for floats."""
        if modules := [*modules_of(self.where)]:
            raise ValueError(
                f"{self.name} holds quantised weights, first of {modules[0]}, but config.json has no quantization_config: "
                "copy config.json again"
            )
        for name in sorted(self.where):
            if name.endswith((".weight", ".bias")) and (kind := self.part(name).get_dtype()) not in _FLOATS:
                raise ValueError(
                    f"{name} in {self.where[name]} is of type {kind}, and weights of {', '.join(_FLOATS)} are read: load the "
                    "checkpoint that it was made from"
                )

    def check_shapes(self, shapes: Mapping[str, Collection[int]]) -> None:
        """ValueError for a tensor of another shape than that of the same name in `shapes`."""
        for name in sorted(shapes.keys() & self.where.keys()):
            if (found := self.part(name).get_shape()) != [*shapes[name]]:
                raise ValueError(
                    f"{self.name} holds weights of another shape than its config.json says: {name} is {found}, not "
                    f"{[*shapes[name]]}. Copy or download it again"
                )


def tensors_of(name: str, origin: Mapping[str, Any]) -> Tensors:
    """All tensors of a checkpoint. name: a folder or hub name. origin: revision and local_files_only.

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
    return Tensors(name, where)


def files_of(name: str, origin: Mapping[str, Any]) -> tuple[list[Path], set[str]]:
    """The files, and the tensors that an index lists (none without one); later files go before earlier ones.

    Raises FileNotFoundError for one that is missing, OSError for a damaged index.
    """
    single = cached_file(name, FILE, _raise_exceptions_for_missing_entries=False, **origin)
    if single is not None:
        return [Path(str(single))], set()
    index = cached_file(name, INDEX, _raise_exceptions_for_missing_entries=False, **origin)
    if index is None:
        raise FileNotFoundError(
            f"{name} has no {FILE}: only safetensors files are loaded; save the model with save_pretrained(), or copy the "
            "file there"
        )
    listed = listed_files(Path(str(index)))
    paths = []
    for file in sorted({*listed.values()}):
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **origin)
        if path is None:
            raise FileNotFoundError(f"{name} has no {file}, which its {INDEX} names: copy the file there")
        paths.append(Path(str(path)))
    return paths, {*listed}


def listed_files(index: Path) -> dict[str, str]:
    """The file of every tensor that an index lists. OSError for one that cannot be read."""
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
