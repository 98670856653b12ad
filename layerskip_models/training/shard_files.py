"""Tensors divided by rows over processes, in safetensors files: one file a process, read again by any number of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_NAME = "shard-{rank:05d}-of-{ranks:05d}.safetensors"
_PATTERN = re.compile(r"shard-(\d{5})-of-(\d{5})\.safetensors")


def rows_of(num_rows: int, rank: int, ranks: int) -> range:
    """The rows of a tensor that a rank of so many holds: as torch.chunk cuts, so the last ranks may have fewer, or none."""
    most = -(-num_rows // ranks)
    return range(min(rank * most, num_rows), min((rank + 1) * most, num_rows))


def write_shard(folder: Path, rank: int, ranks: int, tensors: Mapping[str, Tensor]) -> None:
    """Write a rank's rows of tensors; those without dimensions are whole in every file."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / _NAME.format(rank=rank, ranks=ranks))


class ShardFiles:
    """What `write_shard` of every rank left in a folder. Raises ValueError when a rank's file is missing."""

    def __init__(self, folder: Path) -> None:
        found = {int(match[1]): int(match[2]) for path in folder.iterdir() if (match := _PATTERN.fullmatch(path.name))}
        counts = set(found.values())
        if len(counts) != 1 or sorted(found) != list(range(counts.pop())):
            raise ValueError(
                f"{folder} does not hold the shards of all processes: delete this folder, and the run starts over"
            )
        self._ranks = len(found)
        self._files: list[Any] = [
            safe_open(folder / _NAME.format(rank=rank, ranks=self._ranks), framework="pt")
            for rank in range(self._ranks)
        ]
        self.names = frozenset(self._files[0].keys())

    def read(self, name: str, num_rows: int, wanted: range) -> Tensor:
        """Rows `wanted` of a tensor that has num_rows in all."""
        parts: list[Tensor] = []
        for rank, file in enumerate(self._files):
            held = rows_of(num_rows, rank, self._ranks)
            first, stop = max(wanted.start, held.start), min(wanted.stop, held.stop)
            if first < stop:
                parts.append(file.get_slice(name)[first - held.start : stop - held.start])
        if not parts:
            return torch.empty(0, *self._files[0].get_slice(name).get_shape()[1:])
        return torch.cat(parts)

    def dimensions(self, name: str) -> int:
        """How many dimensions a tensor has; one without is in every file."""
        return len(self._files[0].get_slice(name).get_shape())

    def read_whole(self, name: str) -> Tensor:
        """A tensor that every file holds whole."""
        tensor: Tensor = self._files[0].get_tensor(name)
        return tensor
