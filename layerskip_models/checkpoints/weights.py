"""Where a model's parameters are kept: safetensors files, or a live module. GGUF files are in `gguf_checkpoint`."""

from __future__ import annotations

import json
import math
import mmap
import struct
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from layerskip_models.checkpoints.as_built import rotary_angles
from layerskip_models.checkpoints.parameters import EMBEDDING, HEAD, gate_shapes, parameter_shapes, rotary_frequencies
from layerskip_models.families import family_of
from layerskip_models.fork_safe import fork_safe
from layerskip_models.grouped_weight import GroupedWeight

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""Types of unquantised numbers, as safetensors and GGUF files call them."""
_AHEAD = 64 << 20  # bytes that the system is asked for early, so that a disk is busy between two matrices
_LENT = 1 << 20  # bytes of a file that may stay in the process's memory
_filtering = fork_safe(threading.Lock())  # filters of warnings belong to all threads, of which two may open files


class Weights(Protocol):
    """The parameters of one model under transformers' names.

    checkpoint: what an error about a number that is not finite blames; None if numbers are taken as they are.
    """

    config: Any

    @property
    def checkpoint(self) -> str | None: ...

    @property
    def generation_config(self) -> Any: ...

    def names(self) -> Collection[str]:
        """Return the names of all parameters. A head that is tied to the embedding is not among them."""
        ...

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a parameter's numbers as floats; quantised ones in this dtype if that is bfloat16, else in float32."""
        ...

    def kept(
        self, names: Sequence[str], bits: int, order: Tensor | None = None, *, interleave: bool = False
    ) -> GroupedWeight | None:
        """Return parameters as rows of one weight in the file's own numbers, unless some have none, or none of so few bits.

        order: which of all rows is first, second and so on. interleave: whether the kernels' order is welcome.
        """
        ...

    def gives(self, name: str) -> bool:
        """Return whether the loaded tensor may be kept. Otherwise it belongs to somebody else, and is only read."""
        ...

    def rotary(self) -> tuple[Tensor, float]:
        """Return the rotary frequencies, float32, and what scales their sines and cosines."""
        ...


class MappedFile:
    """A file that the system maps into memory: a part is read from the disk when somebody looks at it."""

    def __init__(self, path: Path) -> None:
        self._bytes, self._lent = torch.empty(0, dtype=torch.uint8, device="cpu"), 0
        self._asked = range(0)  # bytes that the system was asked for
        self._mapped: mmap.mmap | None = None
        if not path.stat().st_size:  # nothing can be mapped
            return
        with path.open("rb") as file, _filtering, warnings.catch_warnings():
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
            self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)

    @property
    def view(self) -> memoryview:
        """All of its bytes."""
        return memoryview(self._mapped or b"")

    def tensor(self, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """View a part of the file as a tensor, which must not be written to."""
        size = math.prod(shape) * dtype.itemsize
        self._expect(begin, size)
        part = self._bytes[begin : begin + size]
        if begin % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(*shape)

    def _expect(self, begin: int, size: int) -> None:
        """Ask the system to read this part and what follows it, and to take earlier parts out of this process."""
        if self._mapped is None or not hasattr(mmap, "MADV_WILLNEED"):
            return
        if self._lent > _LENT:
            self._mapped.madvise(mmap.MADV_DONTNEED)  # what is still wanted comes back from the system's cache
            self._lent = 0
        self._lent += size
        if begin in self._asked and begin + size <= self._asked.stop:
            return
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._asked = range(first, min(begin + size + _AHEAD, len(self._bytes)))
        self._mapped.madvise(mmap.MADV_WILLNEED, first, len(self._asked))


class SafetensorsWeights:
    """`Weights` of a checkpoint in floats. files: whose tensors are read; later ones go before earlier ones.

    listed: tensors that must be in the files. Raises ValueError for tensors of another shape or type, OSError for damaged
    files. Names may be missing.
    """

    generation_config: Any = None

    def __init__(self, checkpoint: str, files: Sequence[Path], listed: Collection[str], config: Any) -> None:
        self.checkpoint, self.config = checkpoint, config
        self._places: dict[str, tuple[MappedFile, int, torch.dtype, tuple[int, ...]]] = {}
        shapes = parameter_shapes(config) | gate_shapes(config)
        lost = {*listed}
        for path in files:
            try:
                with safe_open(path, framework="pt") as checked:  # which checks the header
                    lost -= {*checked.keys()}
            except SafetensorError as error:
                raise OSError(f"{path} is incomplete or damaged ({error}): copy or download it again") from error
            self._add(path, shapes)
        if lost:
            raise OSError(f"{checkpoint} lacks {min(lost)}, which its index lists ({len(lost)} in all): copy it again")
        both = config.tie_word_embeddings and {HEAD, EMBEDDING} <= self._places.keys()
        if both and torch.equal(self.load(HEAD), self.load(EMBEDDING)):  # as in transformers it is tied only then
            del self._places[HEAD]

    def _add(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        file = MappedFile(path)
        (size,) = struct.unpack("<Q", file.view[:8])
        for name, said in sorted(json.loads(bytes(file.view[8 : 8 + size])).items()):
            if name == "__metadata__":
                continue
            kind, shape = said["dtype"], tuple(said["shape"])
            if kind not in FLOATS and name.endswith((".weight", ".bias")):
                known = ", ".join(FLOATS)
                raise ValueError(f"{name} in {path} is of type {kind}, not {known}: load the one that it was made from")
            if name not in shapes:
                if family_of(self.config).foreign and not name.endswith(
                    ".inv_freq"
                ):  # what transformers' class would do with it, nobody knows
                    raise ValueError(f"{path} holds {name}, which is no part of such a model: it is another one")
                continue
            if shape != shapes[name]:
                differs = f"{name} is {[*shape]}, not {[*shapes[name]]}"
                raise ValueError(
                    f"{self.checkpoint} has another shape than in its config.json, {differs}: copy it again"
                )
            self._places[name] = file, 8 + size + said["data_offsets"][0], FLOATS[kind], shape

    def names(self) -> Collection[str]:
        return self._places.keys()

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        if name not in self._places:
            raise ValueError(f"{self.checkpoint} lacks weights, first {name}: it is incomplete, or another model")
        file, begin, dtype, shape = self._places[name]
        return file.tensor(begin, dtype, shape)

    def kept(self, *_: Any, **__: Any) -> None:
        return None

    def gives(self, name: str) -> bool:
        return False

    def rotary(self) -> tuple[Tensor, float]:
        return rotary_frequencies(self.config)


class ModuleWeights:
    """`Weights` of a live module of transformers.

    release: each parameter is emptied when it is loaded. prefix: of the names, for a module that is only part of a model.
    """

    checkpoint = None

    def __init__(self, module: nn.Module, config: Any, *, release: bool = False, prefix: str = "") -> None:
        self.config, self._release, self._module = config, release, module
        self._parameters = {prefix + name: one for name, one in module.named_parameters(remove_duplicate=False)}
        ends = [self._parameters[name] for name in (EMBEDDING, HEAD) if name in self._parameters]
        if len(ends) == 2 and len({(end.device, end.data_ptr()) for end in ends}) == 1:
            del self._parameters[HEAD]

    @property
    def generation_config(self) -> Any:
        return self._module.generation_config

    def names(self) -> Collection[str]:
        return self._parameters.keys()

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        parameter = self._parameters[name]
        if not self._release:
            return parameter
        value = parameter.detach()
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        return value

    def kept(self, *_: Any, **__: Any) -> None:
        return None

    def gives(self, name: str) -> bool:
        return self._release

    def rotary(self) -> tuple[Tensor, float]:
        rotary: Any = self._module.get_submodule("model.rotary_emb")
        return rotary_angles(rotary).float().clone(), float(rotary.attention_scaling)
