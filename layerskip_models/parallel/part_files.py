"""Parts of the tensors in a checkpoint's safetensors files, as a plan says: nothing else of them is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from layerskip_models.parallel.shard_plan import ShardPlan

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Parts:
    """The tensors of a checkpoint's safetensors files, of which parts are read. Used in a `with` statement."""

    def __init__(self, name: str, origin: Mapping[str, Any]) -> None:
        self._name = name
        self._where = _files(name, origin)
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()

    def read(self, name: str, plan: ShardPlan, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's part of one parameter. Raises ValueError for one that is missing, of another shape, or not finite."""
        path = self._where.get(name)
        if path is None:
            raise ValueError(
                f"{self._name} holds no {name}: the checkpoint is not complete, or of another architecture"
            )
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        stored, pieces = self._open[path].get_slice(name), plan.pieces(name)
        if pieces is None:
            value: Tensor = stored[:]
        else:
            dim, parts = pieces
            if parts[-1].stop > stored.get_shape()[dim]:
                raise ValueError(
                    f"{self._name}: {name} has shape {stored.get_shape()}, which its config.json does not fit"
                )
            cut = [stored[p.start : p.stop] if dim == 0 else stored[:, p.start : p.stop] for p in parts]
            value = cut[0] if len(cut) == 1 else torch.cat(cut)
        if plan.added_once(name) and plan.rank:
            value = torch.zeros_like(value)
        # A copy, since what is cut may be a view of the whole, mapped file.
        value = value.to(device=device, dtype=dtype, copy=True).contiguous()
        if not bool(value.isfinite().all()):
            raise ValueError(
                f"{self._name} holds NaN or infinite weights, in {name}: the checkpoint is damaged or its training diverged; "
                "load another one"
            )
        return value


def _files(name: str, origin: Mapping[str, Any]) -> dict[str, Path]:
    """The file of every tensor."""
    index = cached_file(name, _INDEX, _raise_exceptions_for_missing_entries=False, **origin)
    if index is None:
        path = Path(str(cached_file(name, _FILE, **origin)))
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    listed = json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"]
    paths = {file: Path(str(cached_file(name, file, **origin))) for file in sorted(set(listed.values()))}
    return {tensor: paths[file] for tensor, file in listed.items()}
