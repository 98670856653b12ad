"""A transformers Llama as a GGUF file, the format that llama.cpp reads, written with the `gguf` package.

The file has no tokenizer, only the size of the vocabulary: llama.cpp is given token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quant_shape_to_byte_shape, quantize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.engines.k_quants import QUANTISERS, in_blocks
from layerskip_models.decoder_layer import interleave_heads

ROPE_FACTORS = "rope_freqs.weight"


def write_gguf(model: LlamaForCausalLM, path: Path, kind: str) -> None:
    """Write the model's weights to `path`; one tensor at a time is in memory a second time.

    kind: "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1" or one of `QUANTISERS`, of the matrices; norms and biases are F32.
        Those with a Q have scales for every 32 numbers of a row, or for blocks of 256; with 4 bits, embedding and head are
        Q8_0. "Q4_K_M" is the mixture that llama.cpp makes: some matrices, and the head, are Q6_K.
    A head that is tied to the embedding is left out, and llama.cpp takes the embedding for it.
    Raises ValueError for another family, and for rows that the kind cannot hold.
    """
    config = model.config
    if config.model_type != "llama":
        raise ValueError(f"only Llama models are written as GGUF here, this one is {config.model_type!r}")
    block = 256 if "_K" in kind else 32 if "Q" in kind else 1
    widths = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    if any(width % block for width in widths):
        meant = ", ".join(map(str, widths))
        raise ValueError(f"{kind} needs rows of a multiple of {block} numbers; this model's are of {meant}")
    writer = GGUFWriter(path, "llama")
    _describe(writer, config, model.model.rotary_emb.attention_scaling)
    tensors = _tensors(model)
    own = {name: _kind_of(name, tensor.dim(), kind, config.num_hidden_layers) for name, tensor in tensors.items()}
    kinds = {name: GGMLQuantizationType[chosen] for name, chosen in own.items()}
    for name, tensor in tensors.items():
        shape = quant_shape_to_byte_shape(tensor.shape, kinds[name])
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), prod(shape), kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        floats = _reordered(name, tensor, config).float().cpu().numpy()
        ours = own[name] in QUANTISERS
        writer.write_tensor_data(in_blocks(floats, own[name]) if ours else quantize(floats, kinds[name]))
    writer.close()


@contextmanager
def written_gguf(model: LlamaForCausalLM, kind: str) -> Iterator[Path]:
    """Within it, the model's weights in the temporary folder (TMPDIR), as `write_gguf` writes them."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path, kind)
        yield path


def _kind_of(name: str, dimensions: int, kind: str, num_layers: int) -> str:
    """Choose the type of one tensor in a file whose matrices are of `kind`."""
    if dimensions != 2:
        return "F32"
    if kind == "Q4_K_M":
        return "Q6_K" if _is_finer(name, num_layers) else "Q4_K"
    return "Q8_0" if "Q4" in kind and not name.startswith("blk.") else kind


def _is_finer(name: str, num_layers: int) -> bool:
    """Return whether llama.cpp gives this matrix of a Q4_K_M file six bits (`use_more_bits` of its llama-quant.cpp)."""
    if not name.startswith("blk."):
        return True
    layer, eighth = int(name.split(".")[1]), num_layers // 8
    chosen = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return chosen and (".attn_v." in name or ".ffn_down." in name)


def _describe(writer: GGUFWriter, config: LlamaConfig, rope_attention: float) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_attn_factors(rope_attention)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the tensors by their names in the file, in transformers' layout."""
    config, rotary = model.config, model.model.rotary_emb
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():  # names a tied head once, as the embedding
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        found[stored] = parameter.detach()
    # What every rotary frequency is divided by. It holds whatever scaling the model has, as transformers computed it.
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    unscaled = config.rope_parameters["rope_theta"] ** -steps
    found[ROPE_FACTORS] = unscaled / rotary.inv_freq.detach().cpu().double()
    return found


def _reordered(name: str, tensor: Tensor, config: LlamaConfig) -> Tensor:
    """llama.cpp rotates neighbours of a head's query or key, transformers numbers that are half a head apart."""
    if ".attn_q." in name:
        return interleave_heads(tensor, config.num_attention_heads)
    if ".attn_k." in name:
        return interleave_heads(tensor, config.num_key_value_heads)
    return tensor
