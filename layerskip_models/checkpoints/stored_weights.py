"""The weights that a checkpoint's files stand for, as floats or in the files' own 4 bits.

A matrix can stay in its file until its place in memory is known (`stored`).
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from layerskip_models.checkpoints.finite import check_finite
from layerskip_models.checkpoints.packed_weights import dequantise, in_four_bits, modules_of
from layerskip_models.checkpoints.read_ahead import ReadFile
from layerskip_models.checkpoints.schemes import ORIGINAL, SchemeOf
from layerskip_models.checkpoints.stored_tensor import FLOATS, StoredTensor, TensorReader
from layerskip_models.grouped_weight import GroupedWeight

_FLOATS = ("F16", "BF16", "F32", "F64")


class StoredWeights(ABC):
    """name: of the checkpoint. names: of the model's parameters that its files hold.

    keep_bits: numbers of matrices that the file has in this many bits or fewer stay as they are; 0: none do.
    """

    names: Collection[str]

    def __init__(self, name: str, keep_bits: int) -> None:
        self.name, self._keep_bits = name, keep_bits
        self._reader = TensorReader()
        self._files: dict[Path, ReadFile] = {}

    def close(self) -> None:
        """Nothing is read from the files any more, `StoredTensor`s included."""
        self._reader.close()
        for file in self._files.values():
            file.close()

    def _file(self, path: Path) -> ReadFile:
        if path not in self._files:
            self._files[path] = ReadFile(path)
        return self._files[path]

    def keeps_quantised(self, name: str) -> bool:
        """Whether this parameter keeps its numbers where our layout holds them."""
        return self._keep_bits > 0 and name.startswith("model.layers.")

    @abstractmethod
    def stored(self, name: str, dtype: torch.dtype) -> StoredTensor | None:
        """Find a parameter that stays in its file until asked for; None where only `read` knows what it stands for.

        dtype: that its numbers are rounded to. They keep the file's own 16 bits where that is float32, which is wider.
        """

    def expect(self, names: Iterable[str]) -> None:
        """Say in which order parameters will be read."""
        found = (self.stored(name, torch.float32) for name in names if name in self.names)
        self._reader.ahead.expect((one.file, one.begin, one.num_bytes) for one in found if one is not None)

    @abstractmethod
    def floats(self, name: str) -> Tensor:
        """Read a parameter as the floats that the file stands for."""

    @abstractmethod
    def quantised(self, module: str) -> GroupedWeight | None:
        """Read a module's weight with the file's own numbers; None if they cannot be kept."""

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Read a parameter into new memory. ValueError for one that is missing, of another shape, or not finite."""
        value = self.floats(name).to(device=device, dtype=dtype).contiguous()
        check_finite(value, self.name, name)
        return value

    def read_packed(self, module: str) -> GroupedWeight | None:
        """As `read`, but with the file's own numbers; None where they are not kept."""
        if not self.keeps_quantised(f"{module}.weight"):
            return None
        weight = self.quantised(module)
        if weight is not None and not weight.is_finite():
            raise ValueError(f"{self.name} holds NaN or infinite scales, first in {module}: copy or download it again")
        return weight


class SafetensorsWeights(StoredWeights):
    """`StoredWeights` of a checkpoint in floats, or of one that GPTQ or compressed-tensors quantised.

    where: the file of every tensor; files are opened once.
    shapes: of the model's parameters.
    scheme_of: what is said of each quantised module; None for a checkpoint in floats.
    Raises ValueError for floats of another shape or type, and for tensors of a quantised checkpoint that nothing reads.
    """

    def __init__(
        self,
        name: str,
        where: Mapping[str, Path],
        shapes: Mapping[str, torch.Size],
        *,
        scheme_of: SchemeOf | None = None,
        keep_bits: int = 0,
    ) -> None:
        super().__init__(name, keep_bits)
        self._where, self._shapes, self._scheme_of = where, shapes, scheme_of
        self._open: dict[Path, Any] = {}
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._quantised = modules_of(where)
        taken = {f"{module}.{part}" for module, parts in self._quantised.items() for part in parts}
        weights = {f"{module}.weight" for module in self._quantised}
        self.names = (where.keys() - taken) | weights
        if scheme_of is None:
            self._check_floats()
        elif unread := sorted(one for one in self.names - shapes.keys() if one in weights or self._is_used(one)):
            raise ValueError(
                f"{name} holds tensors that no part of the model reads, {len(unread)} in all, first {unread[0]}: {ORIGINAL}"
            )
        for tensor in sorted(shapes.keys() & where.keys() - weights):
            if (found := self._slice(tensor).get_shape()) != [*shapes[tensor]]:
                raise ValueError(
                    f"{name} holds weights of another shape than its config.json says: {tensor} is {found}, not "
                    f"{[*shapes[tensor]]}. Copy or download it again"
                )

    def _check_floats(self) -> None:
        if self._quantised:
            raise ValueError(
                f"{self.name} holds quantised weights, first of {next(iter(self._quantised))}, but config.json has no "
                "quantization_config: copy config.json again"
            )
        for name, path in sorted(self._where.items()):
            if name.endswith((".weight", ".bias")) and (kind := self._slice(name).get_dtype()) not in _FLOATS:
                raise ValueError(
                    f"{name} in {path} is of type {kind}, and weights of {', '.join(_FLOATS)} are read: load the "
                    "checkpoint that it was made from"
                )

    def _is_used(self, name: str) -> bool:
        """Whether leaving a tensor out may change the model. GPTQ writes biases of zeros for linears without any."""
        return not name.endswith("rotary_emb.inv_freq") and bool(self._slice(name)[...].any())

    def _slice(self, name: str) -> Any:
        """Return a tensor in an open file, which `[...]` reads. ValueError for one that is not there."""
        path = self._where.get(name)
        if path is None:
            raise ValueError(
                f"{self.name} lacks weights of the model, first {name}: it is not complete, or another model"
            )
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_slice(name)

    def floats(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if module != name and module in self._quantised:
            return self._read(dequantise, module)
        if (stored := self.stored(name, FLOATS.get(self._slice(name).get_dtype(), torch.float32))) is not None:
            return stored.tensor()
        found: Tensor = self._slice(name)[...].clone()  # of a mapping that would stay in memory
        if not found.is_floating_point():
            raise ValueError(f"{name} is of {found.dtype}, and nothing says what it stands for: {ORIGINAL}")
        return found

    def stored(self, name: str, dtype: torch.dtype) -> StoredTensor | None:
        if name.removesuffix(".weight") in self._quantised:
            return None
        form, shape = self._slice(name).get_dtype(), tuple(self._slice(name).get_shape())
        if form not in FLOATS or 0 in shape or not 1 <= len(shape) <= 2:
            return None
        path = self._where[name]
        if path not in self._headers:
            self._headers[path] = header_of(path)
        start, header = self._headers[path]
        own = FLOATS[form]
        return StoredTensor(
            reader=self._reader,
            file=self._file(path),
            begin=start + int(header[name]["data_offsets"][0]),
            shape=shape,
            form=form,
            row_bytes=shape[-1] * own.itemsize,
            dtype=own if own.itemsize == 2 and dtype == torch.float32 else dtype,
            checkpoint=self.name,
            name=name,
        )

    def quantised(self, module: str) -> GroupedWeight | None:
        return self._read(in_four_bits, module) if module in self._quantised else None

    def _read(self, read: Any, module: str) -> Any:
        """Read a quantised module, by `dequantise` or `in_four_bits`. Errors name it."""
        assert self._scheme_of is not None
        scheme = replace(self._scheme_of(module), shape=tuple(self._shapes[f"{module}.weight"]))
        stored = {part: self._slice(f"{module}.{part}")[...] for part in self._quantised[module]}
        try:
            return read(stored, scheme=scheme)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self.name}: the quantised weight of {module} cannot be read: {error}") from error


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors of a safetensors file begin, and what it says of each. The package has checked it before."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return 8 + size, json.loads(file.read(size))
