"""Small models of every family that GGUF files are read for, written with any metadata, right or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from layerskip_models.decoder_layer import interleave_heads
from layerskip_models.families import family_of

KINDS = ("llama", "qwen2", "qwen3", "phi3", "ouro", "nanbeige")


_SANDWICH = {"input_layernorm_2": "post_attention_norm", "post_attention_layernorm_2": "post_ffw_norm"}


def metadata(config: Any) -> dict[str, Any]:
    """What a file says of a model without scaled rotary positions. Names without a prefix are the architecture's own."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    if config.model_type == "phi3" and config.sliding_window is not None:
        found["attention.sliding_window"] = config.sliding_window
    if config.model_type in ("ouro", "nanbeige"):
        found |= {"num_loops": family_of(config).loops(config), "skip_loop_final_norm": False}
    return found


def tensors(model: PreTrainedModel, kind: str = "F32") -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """Of a file: bytes and type by name. kind: of matrices, whose rows must fit it."""
    config: Any = model.config
    looped = config.model_type in ("ouro", "nanbeige")  # llama.cpp's names of which the package does not know yet
    named = "llama" if looped else config.model_type
    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == named)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    found = {}
    for name, parameter in model.named_parameters():
        stored, value = names.get_name(name, (".weight", ".bias")), parameter.detach().float()
        for own_name, theirs in _SANDWICH.items():
            if name.endswith(f".{own_name}.weight"):
                stored = f"blk.{name.split('.')[2]}.{theirs}.weight"
        assert stored is not None, name
        if named == "llama":  # llama.cpp rotates neighbours there
            for part, number in heads.items():
                value = interleave_heads(value, number) if part in stored else value
        own = GGMLQuantizationType[kind if value.dim() == 2 else "F32"]
        found[stored] = (quantize(value.contiguous().numpy(), own), own)
    return found


def round_to(model: PreTrainedModel, kind: str) -> None:
    """Give a model the numbers that a file of this kind has."""
    own = GGMLQuantizationType[kind]
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = torch.from_numpy(dequantize(quantize(parameter.detach().numpy(), own), own))


def write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    contents: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]],
) -> None:
    """A file with these keys and tensors. Keys with "tokenizer." or "general." in front are not the architecture's."""
    writer = GGUFWriter(path, architecture)
    if "tokenizer.ggml.model" not in keys:
        writer.add_tokenizer_model("no_vocab")
    for name, value in keys.items():
        whole = name if name.startswith(("tokenizer.", "general.")) else f"{architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(whole, value)
        elif isinstance(value, int):
            (writer.add_int32 if value < 0 else writer.add_uint32)(whole, value)
        elif isinstance(value, float):
            writer.add_float32(whole, value)
        elif isinstance(value, str):
            writer.add_string(whole, value)
        else:
            writer.add_array(whole, value)
    for name, (data, kind) in contents.items():
        writer.add_tensor(name, data, raw_dtype=None if kind.name.startswith("F") else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
