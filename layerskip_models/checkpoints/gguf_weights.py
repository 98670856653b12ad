"""The weights of a GGUF file, whole or in parts.

They keep the file's own numbers where that is asked for and our layout holds them; everything else becomes floats.

A file of a Llama has the rows of queries and keys in another order, which whole rows are brought back from.
Source: gguf's `quants.py` and `constants.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from layerskip_models.checkpoints.gguf_blocks import keeps_form, numbers_of_blocks
from layerskip_models.checkpoints.gguf_metadata import architecture_of
from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.stored_tensor import FLOATS, StoredTensor
from layerskip_models.checkpoints.stored_weights import StoredWeights
from layerskip_models.families import head_dim_of
from layerskip_models.grouped_weight import GroupedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GgufWeights(StoredWeights):
    """`StoredWeights` of a file, which the reader has mapped. Parts of matrices are read from the mapped file.

    names: the tensor in the file of each parameter, which has the parameter's shape.
    """

    def __init__(
        self,
        name: str,
        reader: GgufReader,
        config: PreTrainedConfig,
        names: Mapping[str, str],
        *,
        keep_bits: int,
    ) -> None:
        super().__init__(name, keep_bits)
        self._mapped = reader
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._tensors = {name: tensors[stored] for name, stored in names.items()}
        self._config, self._permuted = config, architecture_of(reader) == "llama"
        self.names = self._tensors.keys()

    def keeps_quantised(self, name: str) -> bool:
        """Heads do, too. The embedding counts as one, since it may be tied to it."""
        is_head = name in ("lm_head.weight", "model.embed_tokens.weight")
        return super().keeps_quantised(name) or (is_head and self._keep_bits == 8)

    def stored(self, name: str, dtype: torch.dtype) -> StoredTensor | None:
        from gguf import GGML_QUANT_SIZES

        tensor = self._tensors[name]
        form, shape = tensor.tensor_type.name, tuple(tensor.shape[::-1])
        if 0 in shape or not 1 <= len(shape) <= 2:
            return None
        block, width = GGML_QUANT_SIZES[tensor.tensor_type]
        own = FLOATS.get(form, torch.float32)
        packed = self.keeps_quantised(name) and keeps_form(form, shape[-1], self._keep_bits)
        return StoredTensor(
            reader=self._reader,
            file=self._file(self._mapped.path),
            begin=tensor.begin,
            shape=shape,
            form=form,
            row_bytes=shape[-1] // block * width,
            dtype=own if own.itemsize == 2 and dtype == torch.float32 else dtype,
            checkpoint=self.name,
            name=name,
            order=_order(name, self._config) if self._permuted else None,
            is_quantised=packed and len(shape) == 2,
        )

    def quantised(self, module: str) -> GroupedWeight | None:
        name = f"{module}.weight"
        tensor = self._tensors[name]
        if not keeps_form(tensor.tensor_type.name, int(tensor.shape[0]), self._keep_bits):
            return None
        return numbers_of_blocks(torch.from_numpy(self._data(name)), tensor.tensor_type.name)

    def floats(self, name: str) -> Tensor:
        from gguf import dequantize

        kind = self._tensors[name].tensor_type
        stored = self.stored(name, FLOATS.get(kind.name, torch.float32))
        if stored is not None:
            return stored.tensor()
        data = self._data(name)
        self._mapped.forget()
        if kind.name == "Q8_0":
            return floats_of_eight_bits(torch.from_numpy(data))
        return torch.from_numpy(np.array(dequantize(data, kind)))

    def _data(self, name: str) -> np.ndarray:
        """Copy what the file has, rows in the order of the parameter."""
        data = self._tensors[name].data
        order = _order(name, self._config) if self._permuted else None
        return np.array(data if order is None else data[order.numpy()])


def floats_of_eight_bits(data: Tensor) -> Tensor:
    """Convert a tensor of type Q8_0 to float32, [out, in]: what gguf computes, on all cores.

    data: uint8 [out, bytes of a row].
    """
    blocks = data.unflatten(1, (-1, 34))
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    return (blocks[..., 2:].view(torch.int8) * scales).flatten(1)


def _order(name: str, config: Any) -> Tensor | None:
    """Which row of the file's tensor is which row of the parameter; None if they are in order.

    llama.cpp rotates neighbours of a head's query or key, transformers numbers that are half a head apart.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    return torch.arange(heads * head_dim_of(config), device="cpu").view(heads, -1, 2).transpose(1, 2).flatten()
