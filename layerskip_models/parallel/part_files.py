"""Parts of the tensors in a checkpoint's safetensors files, as a plan says: nothing else of them is read.

Of weights that others quantised the numbers are read in parts, too, and their scales whole, which are a few percent of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from layerskip_models.checkpoints.packed_weights import NUMBERS, Cut, dequantise, in_four_bits, modules_of
from layerskip_models.checkpoints.quantised import weight_files
from layerskip_models.four_bits import FourBitWeight
from layerskip_models.parallel.shard_plan import ShardPlan

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Parts:
    """The tensors of a checkpoint's safetensors files, of which parts are read. Used in a `with` statement.

    name: of the checkpoint. where: the file of every tensor.
    """

    def __init__(self, name: str, where: Mapping[str, Path]) -> None:
        self._name, self._where = name, where
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()

    def read(self, name: str, plan: ShardPlan, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's part of one parameter. Raises ValueError for one that is missing, of another shape, or not finite."""
        value = self._part(name, plan)
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

    def read_packed(self, module: str, plan: ShardPlan) -> FourBitWeight | None:
        """This rank's part of a layer's matrix that stays in 4 bits; None for one that does not."""
        return None

    def _part(self, name: str, plan: ShardPlan) -> Tensor:
        stored, pieces = self._stored(name), plan.pieces(name)
        if pieces is None:
            whole: Tensor = stored[:]
            return whole
        dim, parts = pieces
        if parts[-1].stop > stored.get_shape()[dim]:
            raise ValueError(f"{self._name}: {name} has shape {stored.get_shape()}, which its config.json does not fit")
        return one_behind_the_other(
            [stored[p.start : p.stop] if dim == 0 else stored[:, p.start : p.stop] for p in parts]
        )

    def _joined(self, module: str, found: Sequence[FourBitWeight | None]) -> FourBitWeight | None:
        """What `cuts_of` a matrix came to: all are kept in 4 bits, or none. Raises ValueError for scales of NaN."""
        weights = [weight for weight in found if weight is not None]
        if not weights:
            return None
        weight = FourBitWeight.cat(weights)
        if not weight.is_finite():
            raise ValueError(f"{self._name} holds NaN or infinite scales, in {module}: copy or download it again")
        return weight

    def _stored(self, name: str) -> Any:
        """A slice of an open file."""
        path = self._where.get(name)
        if path is None:
            raise ValueError(
                f"{self._name} holds no {name}: the checkpoint is not complete, or of another architecture"
            )
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_slice(name)


class QuantisedParts(Parts):
    """The same of a checkpoint that GPTQ or compressed-tensors quantised: floats are what it stands for.

    keep_packed: matrices of layers stay in 4 bits where they can. first_version: see `packed_weights.dequantise`.
    """

    def __init__(self, name: str, origin: Mapping[str, Any], *, first_version: bool, keep_packed: bool) -> None:
        where: dict[str, Path] = {}
        for path in weight_files(name, **origin):
            with safe_open(path, framework="pt") as file:
                where.update(dict.fromkeys(file.keys(), path))
        super().__init__(name, where)
        self._quantised = modules_of(where)
        self._first_version, self._keep_packed = first_version, keep_packed

    def read_packed(self, module: str, plan: ShardPlan) -> FourBitWeight | None:
        if not self._keep_packed or module not in self._quantised or not module.startswith("model.layers."):
            return None
        with self._told(module):
            stored = self._tensors(module)
            found = [
                in_four_bits(stored, first_version=self._first_version, cut=cut)
                for cut in cuts_of(f"{module}.weight", plan)
            ]
        return self._joined(module, found)

    def _part(self, name: str, plan: ShardPlan) -> Tensor:
        module = name.removesuffix(".weight")
        if module == name or module not in self._quantised:
            return super()._part(name, plan)
        with self._told(module):
            stored = self._tensors(module)
            found = [
                dequantise(stored, first_version=self._first_version, cut=cut)
                for cut in cuts_of(f"{module}.weight", plan)
            ]
        return one_behind_the_other(found)

    def _tensors(self, module: str) -> dict[str, Any]:
        """Those of a module by their names within it: of the numbers a slice of an open file, of all else everything."""
        found: dict[str, Any] = {}
        for part in self._quantised[module]:
            stored = self._stored(f"{module}.{part}")
            found[part] = stored if part in NUMBERS else stored[...]
        return found

    @contextmanager
    def _told(self, module: str) -> Iterator[None]:
        """Within it errors name the module."""
        try:
            yield
        except (ValueError, KeyError, RuntimeError) as error:
            raise ValueError(f"{self._name}: the quantised weight of {module} cannot be read: {error}") from error


def one_behind_the_other(parts: Sequence[Tensor]) -> Tensor:
    """A single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def cuts_of(name: str, plan: ShardPlan) -> list[Cut]:
    """The parts of a parameter that are kept, one behind the other."""
    pieces = plan.pieces(name)
    if pieces is None:
        return [None]
    dim, parts = pieces
    return [(dim, range(part.start, part.stop)) for part in parts]


def float_files(name: str, origin: Mapping[str, Any]) -> dict[str, Path]:
    """The file of every tensor of a checkpoint that is not quantised. origin: revision and local_files_only."""
    index = cached_file(name, _INDEX, _raise_exceptions_for_missing_entries=False, **origin)
    if index is None:
        path = Path(str(cached_file(name, _FILE, **origin)))
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    listed = json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"]
    paths = {file: Path(str(cached_file(name, file, **origin))) for file in sorted(set(listed.values()))}
    return {tensor: paths[file] for tensor, file in listed.items()}
