"""The weights of a GGUF file, with those of types Q4_0 and Q4_1 left in 4 bits.

A row of such a tensor is blocks of 32 inputs. Q4_0: a float16 scale d and 16 bytes, byte j with input j in its low and input
16 + j in its high four bits; a number q stands for d (q - 8). Q4_1: d, a float16 m, the 16 bytes; q stands for d q + m. That
is what `four_bits` keeps, so only places change. Everything else becomes floats.

A file of a Llama has the rows of queries and keys in another order, which whole rows are brought back from.
Source: gguf's `quants.py` and `constants.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from layerskip_models.four_bits import CHUNK, FourBitWeight, pack_nibbles

_BLOCK = 32
_BYTES = {"Q4_0": 18, "Q4_1": 20}
_PERMUTED = ("llama",)
_AS_THEY_ARE = ("qwen2", "qwen3", "phi3")


def keeps_four_bits(reader: Any, architecture: str) -> bool:
    """Whether `read_gguf_weights` reads this file and would keep some of it in 4 bits. reader: a `gguf.GGUFReader`."""
    known = architecture in (*_PERMUTED, *_AS_THEY_ARE)
    return known and any(tensor.tensor_type.name in _BYTES for tensor in reader.tensors)


def read_gguf_weights(
    reader: Any, architecture: str, config: PreTrainedConfig, names: dict[str, str], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, FourBitWeight]]:
    """(weights as floats by their names in transformers, 4-bit weights by the names of their modules).

    names: the tensor in the file of each of the model's parameters. Matrices of layers can be in 4 bits, and nothing else.
    """
    from gguf import dequantize

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    floats: dict[str, Tensor] = {}
    packed: dict[str, FourBitWeight] = {}
    for name, stored in names.items():
        tensor = tensors[stored]
        order = _order(name, config) if architecture in _PERMUTED else None
        module = name.removesuffix(".weight")
        columns = int(tensor.shape[0])
        if tensor.tensor_type.name in _BYTES and name.startswith("model.layers.") and columns % CHUNK == 0:
            weight = four_bits_of_blocks(torch.from_numpy(np.array(tensor.data)), tensor.tensor_type.name)
            packed[module] = weight if order is None else weight.reordered(order)
            continue
        full = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        floats[name] = (full if order is None else full[order]).to(dtype)
    return floats, packed


def four_bits_of_blocks(data: Tensor, kind: str) -> FourBitWeight:
    """A tensor's bytes, uint8 [out, bytes of a row]. kind: "Q4_0" or "Q4_1"."""
    blocks = data.unflatten(1, (-1, _BYTES[kind]))
    halves, nibbles = blocks[..., :-16].contiguous().view(torch.float16), blocks[..., -16:]
    values = torch.cat((nibbles & 15, nibbles >> 4), dim=2).flatten(1)
    offsets = halves[..., 1].float().contiguous() if kind == "Q4_1" else None
    return FourBitWeight(pack_nibbles(values), halves[..., 0].contiguous(), offsets)


def _order(name: str, config: Any) -> Tensor | None:
    """Which row of the file's tensor is which row of the parameter; None if they are in order.

    llama.cpp rotates neighbours of a head's query or key, transformers numbers that are half a head apart.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return torch.arange(heads * size, device="cpu").view(heads, -1, 2).transpose(1, 2).flatten()
