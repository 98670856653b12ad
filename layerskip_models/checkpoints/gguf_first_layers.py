"""The first layers of a GGUF file as another GGUF file, with every byte of what is kept as it was.

Vocabulary, chat template and all other keys stay; only the number of layers changes. So the numbers keep the file's own type,
and an engine finds the same tokens in both files.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from layerskip_models.checkpoints.gguf_metadata import architecture_of
from layerskip_models.checkpoints.gguf_reader import GgufReader

_HEADER = struct.Struct("<4sIQQ")
_INTEGERS = {4: "I", 5: "i", 10: "Q", 11: "q"}  # by GGUF's type of a value
_FLOATS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}  # GGML's types
_PIECE = 1 << 24  # bytes that are copied at a time


def write_first_layers(
    source: Path, target: Path, num_layers: int, added: Mapping[str, np.ndarray] | None = None
) -> None:
    """Write the first `num_layers` layers of a file, and what is not in a layer.

    added: the tensors of one more layer by their names in the file (`blk.N.`), float16 or float32 in the order of rows.
    Raises ValueError for a number of layers that the file does not have, and for one whose keys say something of each layer.
    """
    reader = GgufReader(source)
    architecture = architecture_of(reader)
    key = f"{architecture}.block_count"
    existing = reader.value(key)
    if not 1 <= num_layers < existing:
        raise ValueError(f"num_layers must be in [1, {existing - 1}] for this {existing}-layer file, got {num_layers}")
    for name in reader.keys:
        if name.startswith(f"{architecture}.") and reader.length(name) == existing:
            raise ValueError(
                f"{source.name} says {name} of each layer: its first layers cannot be written as a GGUF file"
            )
    kept = [tensor for tensor in reader.tensors if _layer_of(tensor.name) < num_layers]
    arrays = {**{tensor.name: tensor.data for tensor in kept}, **(added or {})}
    kinds = {tensor.name: int(tensor.tensor_type) for tensor in kept}
    shapes = {tensor.name: tensor.shape for tensor in kept}
    for name, array in (added or {}).items():
        kinds[name], shapes[name] = _FLOATS[array.dtype], array.shape[::-1]
    keys = bytearray(reader.raw(_HEADER.size, reader.keys_end))
    kind, place = reader.place(key)
    struct.pack_into(f"<{_INTEGERS[kind]}", keys, place - _HEADER.size, num_layers + bool(added))
    with target.open("wb") as file:
        file.write(_HEADER.pack(b"GGUF", 3, len(arrays), len(reader.keys)))
        file.write(keys)
        offset = 0
        for name, array in arrays.items():
            file.write(_described(name, shapes[name], kinds[name], offset))
            offset += array.nbytes + -array.nbytes % reader.alignment
        for array in arrays.values():
            _align(file, reader.alignment)
            for piece in _pieces(array):
                file.write(piece)
        _align(file, reader.alignment)


def _layer_of(name: str) -> int:
    """The index of a tensor's layer; -1 for one that is in none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _described(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    text = name.encode()
    return struct.pack(f"<Q{len(text)}sI{len(shape)}QIQ", len(text), text, len(shape), *shape, kind, offset)


def _pieces(array: np.ndarray) -> Iterator[bytes]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), _PIECE):
        yield flat[start : start + _PIECE].tobytes()


def _align(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))
