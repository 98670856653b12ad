"""GGUF files, read by transformers: where the file is, its configuration, its weights, its tokenizer.

transformers undoes the quantisation of every tensor; what is to stay in 4 bits, `gguf_weights` reads. transformers ignores
scaled rotary positions and tensors that it does not know. Here the first is put into the configuration, and a file with the
second is refused, because it would become another model. A tokenizer or a generation_config.json beside the file goes before
what the file says, since a GGUF file describes a tokenizer only roughly.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from layerskip_models.checkpoints.gguf_weights import (
    GgufTensors,
    is_read_here,
    keeps_four_bits,
    read_gguf_weights,
)
from layerskip_models.four_bits import FourBitWeight

GGUF_METHOD = "gguf"
_ROPE_FACTORS = "rope_freqs.weight"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CONVERT = "load the checkpoint that the file was made from"


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a name stands for: itself, or the only one of a folder without a checkpoint in safetensors.

    Raises ValueError for a folder with several, and for a file that is one part of several.
    """
    path = Path(name)
    if path.suffix != ".gguf":
        if not path.is_dir() or any(path.glob("*.safetensors")):
            return None
        files = sorted(path.glob("*.gguf"))
        if not files:
            return None
        if len(files) > 1:
            raise ValueError(
                f"{name} holds {len(files)} GGUF files: name one of them ({', '.join(file.name for file in files)})"
            )
        path = files[0]
    if not path.is_file():
        return None
    if "-of-0" in path.stem:
        raise ValueError(f"{path} is one part of several: join them first (llama-gguf-split --merge)")
    return path


def gguf_config(path: Path) -> PretrainedConfig:
    """The configuration of a GGUF file, marked as such in `quantization_config`.

    Raises ValueError for what transformers does not read, or where it would leave something out; OSError for a damaged file.
    """
    reader = _reader(path)
    types = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    kind = _value(reader, "general.architecture")
    if (head_dim := _value(reader, f"{kind}.attention.key_length")) and hasattr(config, "head_dim"):
        config.head_dim = head_dim  # transformers' reader leaves the default of a Qwen3
    _tensor_names(reader, config, path)
    config.rope_parameters = {**config.rope_parameters, **_rope(reader, config, path)}
    config.bos_token_id = _value(reader, "tokenizer.ggml.bos_token_id")
    config.eos_token_id = _ends(reader)
    few_bits = not types <= _FLOATS.keys()
    config.dtype = torch.bfloat16 if few_bits else _FLOATS[min(types, key=lambda kind: _FLOATS[kind].itemsize)]
    config.quantization_config = {"quant_method": GGUF_METHOD, "few_bits": few_bits, "types": sorted(types)}
    return config


def load_gguf(name: str, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of a GGUF file with float weights. name: the file or its folder. config: of `gguf_config`, unmarked."""
    path = gguf_file(name)
    assert path is not None
    model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=dtype, device_map={"": device}, output_loading_info=True
    )
    if wrong := sorted(found["missing_keys"]) or sorted(map(str, found["mismatched_keys"])):
        raise ValueError(f"{path} lacks weights of the model, or they have another shape, first {wrong[0]}: {_CONVERT}")
    # It is an ordinary model now: transformers' marks would keep it from being saved, and selfspec from running it.
    del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        if mark in vars(model):
            delattr(model, mark)
    return named_gguf(model, name)


def named_gguf(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The model with the file's name and how it generates, from beside the file or from its configuration."""
    model.config.name_or_path = model.name_or_path = name
    model.generation_config = gguf_generation_config(name, model.config)
    return model


def gguf_generation_config(name: str, config: PretrainedConfig) -> GenerationConfig:
    """How the model of a file generates, from beside the file or from its configuration."""
    path = gguf_file(name)
    assert path is not None
    if (path.parent / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path.parent)
    return GenerationConfig.from_model_config(config)


def packed_gguf(
    name: str, config: PretrainedConfig, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, FourBitWeight]] | None:
    """The weights of a file, some of them in 4 bits (`read_gguf_weights`); None if none are. Arguments as `load_gguf`'s."""
    path = gguf_file(name)
    assert path is not None
    reader = _reader(path)
    architecture = _value(reader, "general.architecture")
    if not keeps_four_bits(reader, architecture):
        return None
    return read_gguf_weights(GgufTensors(reader, architecture, config, _tensor_names(reader, config, path)), dtype)


def open_gguf(name: str, config: PretrainedConfig) -> GgufTensors:
    """The tensors of a file, to be read in parts. Arguments as `load_gguf`'s.

    Raises ValueError for an architecture whose order of rows is not known here.
    """
    path = gguf_file(name)
    assert path is not None
    reader = _reader(path)
    architecture = _value(reader, "general.architecture")
    if not is_read_here(architecture):
        raise ValueError(f"parts of a GGUF file of the architecture {architecture!r} are not read: {_CONVERT}")
    return GgufTensors(reader, architecture, config, _tensor_names(reader, config, path))


def gguf_tokenizer(path: Path, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer beside the file, or the one that the file describes.

    Raises FileNotFoundError where there is neither, or transformers cannot build it.
    """
    if (path.parent / "tokenizer.json").is_file() or (path.parent / "tokenizer.model").is_file():
        return AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False, **options)
    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False, **options)
    except Exception as error:  # of many kinds: the vocabulary is somebody else's
        raise FileNotFoundError(
            f"{path} has no tokenizer that transformers can build ({error}): "
            "put the tokenizer.json of the original checkpoint beside it"
        ) from error


def _reader(path: Path) -> Any:
    """A `gguf.GGUFReader`, which maps the file and reads its header."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"reading {path.name} needs the package gguf: pip install 'selfspec[gguf]'") from None
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise OSError(f"{path} is incomplete or damaged ({error}): copy or download it again") from error


def _value(reader: Any, key: str) -> Any:
    """A field's value; None if the file has no such field."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _ends(reader: Any) -> list[int] | None:
    """The tokens that end a text or a turn."""
    found = [_value(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return list(dict.fromkeys(end for end in found if end is not None)) or None


def _tensor_names(reader: Any, config: PretrainedConfig, path: Path) -> dict[str, str]:
    """The file's tensor for each parameter of the model that transformers makes of it.

    Raises ValueError unless the file has these tensors and no others.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = _value(reader, "general.architecture")
    architecture = next((key for key, value in MODEL_ARCH_NAMES.items() if value == kind), None)
    if architecture is None or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path} is a {kind!r} model, which transformers cannot read from GGUF: {_CONVERT}")
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    wanted = {name: str(names.get_name(name, (".weight", ".bias"))) for name, _ in model.named_parameters()}
    there = {tensor.name for tensor in reader.tensors} - {_ROPE_FACTORS}
    if unread := sorted(there - set(wanted.values())):
        raise ValueError(
            f"{path} holds tensors that transformers would leave out, {len(unread)} in all, first {unread[0]}: {_CONVERT}"
        )
    if missing := sorted(set(wanted.values()) - there):
        raise ValueError(f"{path} lacks tensors of the model, first {missing[0]}: {_CONVERT}")
    return wanted


def _rope(reader: Any, config: PretrainedConfig, path: Path) -> dict[str, Any]:
    """Rotary scaling for `rope_parameters`, which transformers' reader leaves out.

    A GGUF file has it as a kind and a factor (linear), or as what each frequency is divided by (Llama 3).
    """
    kind = _value(reader, "general.architecture")
    scaling = _value(reader, f"{kind}.rope.scaling.type") or "none"
    factor = _value(reader, f"{kind}.rope.scaling.factor") or 1.0
    attention = _value(reader, f"{kind}.rope.scaling.attn_factor") or 1.0
    factors = next((np.array(tensor.data) for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), np.ones(1))
    if scaling in ("none", "linear") and attention == 1.0:
        if np.allclose(factors, factors[0], rtol=1e-4):
            total = float(factors[0]) * (factor if scaling == "linear" else 1.0)
            return {} if math.isclose(total, 1.0, rel_tol=1e-4) else {"rope_type": "linear", "factor": total}
        llama_3 = {"rope_type": "llama3", "factor": float(round(factors.max())), **_LLAMA_3}
        if scaling == "none" and np.allclose(factors, _llama_3_factors(config, llama_3), rtol=1e-3):
            return llama_3
    raise ValueError(f"{path} scales rotary positions in a way that is not read here ({scaling}): {_CONVERT}")


def _llama_3_factors(config: PretrainedConfig, rope: dict[str, Any]) -> np.ndarray:
    """What Llama 3 divides each rotary frequency by, [head_dim / 2], of those `rope_parameters`."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * math.pi * config.rope_parameters["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)
