"""GGUF files: where the file is, its configuration, its weights, its tokenizer.

Weights keep the file's own numbers where that is asked for and our layout holds them; everything else becomes floats.
A file of a Llama or a looped model has the rows of queries and keys in another order, which they are brought back from.

A file with tensors that the model does not have is refused, because it would become another model. A tokenizer or a
generation_config.json beside the file goes before what the file says, since a GGUF file describes a tokenizer only roughly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerskip_models.checkpoints.finite import not_finite
from layerskip_models.checkpoints.gguf_blocks import float_rows, keeps_form, kept_rows
from layerskip_models.checkpoints.gguf_metadata import ROPE_FACTORS, UnsupportedModelError, architecture_of, read_config
from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.gguf_tokenizer import build_tokenizer
from layerskip_models.checkpoints.parameters import HEAD, parameter_shapes, rotary_frequencies
from layerskip_models.checkpoints.supported import GGUF_METHOD
from layerskip_models.checkpoints.weights import FLOATS
from layerskip_models.families import family_of, head_dim_of
from layerskip_models.grouped_weight import GroupedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_PERMUTED = ("llama", "ouro", "nanbeige")
_OUTER_NORMS = {"input_layernorm_2": "post_attention_norm", "post_attention_layernorm_2": "post_ffw_norm"}


def gguf_file(name: str) -> Path | None:
    """Find the GGUF file that a name stands for, or the only one of a folder. Raises ValueError for several or a part."""
    path = Path(name)
    if path.suffix != ".gguf":
        if not path.is_dir() or any(path.glob("*.safetensors")):
            return None
        files = sorted(path.glob("*.gguf"))
        if not files:
            return None
        if len(files) > 1:
            raise ValueError(f"{name} holds {len(files)} GGUF files: name one ({', '.join(one.name for one in files)})")
        path = files[0]
    if not path.is_file():
        return None
    if "-of-0" in path.stem:
        raise ValueError(f"{path} is one part of several: join them first (llama-gguf-split --merge)")
    return path


def open_gguf(path: Path) -> GgufWeights:
    """Open a GGUF file, and compare it with the model that it describes. Its configuration is marked as that of a file.

    Raises ValueError for what is not read, or where something would be left out; OSError for a damaged file.
    """
    reader = _reader(path)
    with _named(path):
        config = read_config(reader)
        names = _tensor_names(reader, config)
    types = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    few_bits = not types <= FLOATS.keys()
    config.dtype = torch.bfloat16 if few_bits else FLOATS[min(types, key=lambda kind: FLOATS[kind].itemsize)]
    config.quantization_config = {"quant_method": GGUF_METHOD, "few_bits": few_bits, "types": sorted(types)}
    return GgufWeights(path, reader, config, names)


def gguf_tokenizer(path: Path, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the file, or the one that the file describes.

    options: of transformers' `from_pretrained`, for one that lies beside the file.
    Raises FileNotFoundError where there is neither, or the file's is of a kind that is not known.
    """
    if (path.parent / "tokenizer.json").is_file() or (path.parent / "tokenizer.model").is_file():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False, **options)
    try:
        return build_tokenizer(path, _reader(path))
    except OSError:
        raise
    except Exception as error:  # of many kinds: the vocabulary is somebody else's
        what = error if isinstance(error, ValueError) else f"has a tokenizer that cannot be built ({error})"
        raise FileNotFoundError(f"{path} {what}: put the tokenizer.json of the original model beside it") from error


def _reader(path: Path) -> GgufReader:
    try:
        return GgufReader(path)
    except ValueError as error:
        raise OSError(f"{path} is incomplete or damaged ({error}): copy or download it again") from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Within it a ValueError, which begins with what the file does or has, is a sentence that also says what to do."""
    try:
        yield
    except UnsupportedModelError as error:
        raise ValueError(f"{path} {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}: load the checkpoint that the file was made from") from error


def _tensor_names(reader: GgufReader, config: PreTrainedConfig) -> dict[str, str]:
    """Find the file's tensor for each parameter. Raises ValueError unless it has these, of these shapes, and no others."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    own = "llama" if family_of(config).foreign else architecture_of(reader)
    kind = next(key for key, value in MODEL_ARCH_NAMES.items() if value == own)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    shapes = {name: [*shape] for name, shape in parameter_shapes(config).items()}
    if config.tie_word_embeddings:
        del shapes[HEAD]
    wanted = {name: str(names.get_name(name, (".weight", ".bias"))) for name in shapes}
    for layer, (norm, stored) in product(range(config.num_hidden_layers), _OUTER_NORMS.items()):
        if (name := f"model.layers.{layer}.{norm}.weight") in shapes:
            wanted[name] = f"blk.{layer}.{stored}.weight"
    there = {tensor.name: [*tensor.shape][::-1] for tensor in reader.tensors if tensor.name != ROPE_FACTORS}
    if unread := sorted(there.keys() - {*wanted.values()}):
        raise ValueError(f"holds tensors that are not the model's, {len(unread)} in all, first {unread[0]}")
    if missing := sorted({*wanted.values()} - there.keys()):
        raise ValueError(f"lacks tensors of the model, first {missing[0]}")
    for name, stored in wanted.items():
        if there[stored] != shapes[name]:
            raise ValueError(
                f"contradicts itself: {stored} has shape {there[stored]}, and what the file says of its model needs "
                f"{shapes[name]}"
            )
    return wanted


class GgufWeights:
    """`Weights` of a GGUF file. names: the file's tensor for each parameter."""

    generation_config: Any = None

    def __init__(self, path: Path, reader: GgufReader, config: Any, names: Mapping[str, str]) -> None:
        self.path, self.checkpoint, self.config = path, str(path), config
        self._file, self._permuted = reader.file, architecture_of(reader) in _PERMUTED
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._tensors = {name: tensors[stored] for name, stored in names.items()}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor, rows, order = self._tensors[name], self._rows(name), self._order([name])
        if tensor.tensor_type.name in FLOATS:
            return rows if order is None else rows[order]
        dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        found = float_rows(rows, tensor.tensor_type.name, order, dtype)
        if found is None:
            raise not_finite(self.checkpoint, name)
        return found.view(tensor.shape[::-1])

    def kept(
        self, names: Sequence[str], bits: int, order: Tensor | None = None, *, interleave: bool = False
    ) -> GroupedWeight | None:
        forms = [self._tensors[name].tensor_type.name for name in names]
        if not all(keeps_form(form, self._tensors[name].shape[0], bits) for form, name in zip(forms, names)):
            return None
        parts, own = [self._rows(name) for name in names], self._order(names)
        if own is not None:
            order = own if order is None else own[order]
        if len({*forms}) == 1:
            whole = kept_rows(parts, forms[0], order, interleave=interleave)
            if whole is not None:
                return whole
        several = []
        for name, part, form in zip(names, parts, forms):
            found = kept_rows([part], form)
            if found is None:
                raise not_finite(self.checkpoint, name)
            several.append(found)
        whole = GroupedWeight.cat(several)
        return whole if order is None else whole.reordered(order)

    def _rows(self, name: str) -> Tensor:
        """Return a tensor as it lies in the file: floats, or uint8 [rows, bytes of a row]."""
        tensor = self._tensors[name]
        form, shape = tensor.tensor_type.name, tensor.shape[::-1]
        if form in FLOATS:
            return self._file.tensor(tensor.begin, FLOATS[form], shape)
        return self._file.tensor(tensor.begin, torch.uint8, (math.prod(shape[:-1]), tensor.row_bytes))

    def _order(self, names: Sequence[str]) -> Tensor | None:
        """Return which row of the file's tensors, one after another, is which row of the parameters; None if in order."""
        if not self._permuted or not any(name.split(".")[-2] in ("q_proj", "k_proj") for name in names):
            return None
        found, first = [], 0
        for name in names:
            found.append(first + _order(name, self._tensors[name].shape[-1], self.config))
            first += self._tensors[name].shape[-1]
        return torch.cat(found)

    def what_is_rounded(self, names: Sequence[str]) -> str:
        """Say in a sentence which of the file's matrices, by these names, have become 8 bits."""
        types = Counter(self._tensors[name].tensor_type.name for name in names).most_common()
        return (
            f"{len(names)} matrices of {self.path.name} are rounded to 8 bits with one scale per output "
            f"({', '.join(f'{count} {kind}' for kind, count in types)}): our layout does not hold their numbers, or those of "
            "a matrix that is computed with them"
        )

    def gives(self, name: str) -> bool:
        return self._tensors[name].tensor_type.name not in FLOATS

    def rotary(self) -> tuple[Tensor, float]:
        return rotary_frequencies(self.config)


def _order(name: str, rows: int, config: Any) -> Tensor:
    """Return which row of the file's tensor is which row of the parameter: rotary pairs are neighbours in llama.cpp."""
    order = torch.arange(rows, device="cpu")
    turned = name.split(".")[-2] in ("q_proj", "k_proj")
    return order.view(-1, head_dim_of(config) // 2, 2).transpose(1, 2).flatten() if turned else order
