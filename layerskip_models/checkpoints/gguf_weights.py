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
from layerskip_models.checkpoints.packed_weights import Cut
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

    def may_keep(self, name: str) -> bool:
        """Heads do, too. The embedding counts as one, since it may be tied to it."""
        is_head = name in ("lm_head.weight", "model.embed_tokens.weight")
        return super().may_keep(name) or (is_head and self._keep_bits == 8)

    def stored(self, name: str, dtype: torch.dtype) -> StoredTensor | None:
        from gguf import GGML_QUANT_SIZES

        tensor = self._tensors[name]
        form, shape = tensor.tensor_type.name, tuple(tensor.shape[::-1])
        if 0 in shape or not 1 <= len(shape) <= 2:
            return None
        block, width = GGML_QUANT_SIZES[tensor.tensor_type]
        own = FLOATS.get(form, torch.float32)
        packed = self.may_keep(name) and keeps_form(form, shape[-1], self._keep_bits)
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
            keeps_numbers=packed and len(shape) == 2,
        )

    def own_numbers(self, module: str, cut: Cut = None) -> GroupedWeight | None:
        name = f"{module}.weight"
        tensor = self._tensors[name]
        if not keeps_form(tensor.tensor_type.name, int(tensor.shape[0]), self._keep_bits):
            return None
        data, skipped = self._data(name, cut)
        found = numbers_of_blocks(torch.from_numpy(data), tensor.tensor_type.name)
        if cut is None or cut[0] == 0 or len(cut[1]) == found.shape[1]:
            return found
        return found.as_bytes().columns(skipped, len(cut[1]))  # cut within a block

    def floats(self, name: str, cut: Cut = None) -> Tensor:
        from gguf import dequantize

        kind = self._tensors[name].tensor_type
        whole = self.stored(name, FLOATS.get(kind.name, torch.float32)) if cut is None else None
        if whole is not None:
            return whole.tensor()
        data, skipped = self._data(name, cut)
        self._mapped.forget()
        if kind.name == "Q8_0":
            found = floats_of_eight_bits(torch.from_numpy(data))
        else:
            found = torch.from_numpy(np.array(dequantize(data, kind)))
        return found if cut is None or cut[0] == 0 else found[:, skipped : skipped + len(cut[1])]

    def _data(self, name: str, cut: Cut) -> tuple[np.ndarray, int]:
        """What the file has of a part, in whole blocks of a row, and how many inputs these have before the part."""
        from gguf import GGML_QUANT_SIZES

        tensor = self._tensors[name]
        columns, data = int(tensor.shape[0]), tensor.data
        rows, inputs = range(len(data)), range(columns)
        if cut is not None:
            rows, inputs = (cut[1], inputs) if cut[0] == 0 else (rows, cut[1])
        order = _order(name, self._config) if self._permuted else None
        first = 0
        if cut is not None and cut[0] == 1:
            block, _ = GGML_QUANT_SIZES[tensor.tensor_type]
            width = data.shape[1] * block // columns
            first = inputs.start // block * block
            data = data[:, first // block * width : -(-inputs.stop // block) * width]
        own = slice(rows.start, rows.stop)
        return np.array(data[own] if order is None else data[order[own].numpy()]), inputs.start - first


def floats_of_eight_bits(data: Tensor) -> Tensor:
    """A tensor of type Q8_0 in float32, [out, in]: what gguf computes, on all cores. data: uint8 [out, bytes of a row]."""
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
