"""A whole model in 4 bits as a compressed-tensors checkpoint ("pack-quantized", W4A16), which vLLM and SGLang know.

Every linear of the layers becomes int4 in groups of 32 inputs with one scale each and no zero points. Embedding, head and
norms stay as they are. `packed_weights` reads such checkpoints back and describes the tensors.

Source of the format: the README and the compressors of vllm-project/compressed-tensors; vLLM 0.33.0 keeps the scales in the
model's own dtype (compressed_tensors_wNa16.py), so they are stored in it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from layerskip_models.four_bit_rounding import fits_four_bits, round_to_four_bits
from layerskip_models.grouped_weight import unpack_nibbles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP = 32
"""Inputs that share a scale: the size with the smallest error of those that vLLM's kernels take."""
_LAYERS = "model.layers."


def write_in_four_bits(model: PreTrainedModel, folder: Path) -> float:
    """Write configuration and weights to a folder that exists. Returns the bytes of its layers over those of the model's.

    Linears whose inputs are no multiple of 64 stay as they are, and the configuration names them.
    Raises ValueError if there is no linear that fits, and for weights that are beyond the scales' type.
    """
    state = dict(model.state_dict())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    own = _bytes_of_layers(state)
    ignored, count = [], 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if module is head or not fits_four_bits(module.in_features):
            ignored.append(name)
            if module is head and module.weight is embedding.weight:
                del state[f"{name}.weight"]
            continue
        del state[f"{name}.weight"]
        count += 1
        state |= {f"{name}.{part}": tensor for part, tensor in _packed(module.weight.detach(), name).items()}
    if not count:
        raise ValueError("no matrix of this model fits 4 bits: its layers have inputs that are no multiple of 64")
    save_torch_state_dict({name: tensor.contiguous() for name, tensor in state.items()}, folder)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    config.quantization_config = _description(ignored)
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    return _bytes_of_layers(state) / own


def _packed(weight: Tensor, name: str) -> dict[str, Tensor]:
    """The three tensors of a matrix [out, in]; in: a multiple of 64."""
    rounded = round_to_four_bits(weight, group=GROUP, symmetric=True)
    numbers = unpack_nibbles(rounded.packed)  # 0 to 15, for -8 to 7: that is how they are stored
    words = (numbers[:, 0::2] | numbers[:, 1::2] << 4).contiguous().view(torch.int32)  # the first in the lowest bits
    scale = rounded.groups.float()
    if rounded.factors is not None:
        scale = scale * rounded.factors.unsqueeze(1)
    stored = scale.to(torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16)
    if not bool(stored.isfinite().all()) or bool(((stored == 0) & (scale != 0)).any()):
        raise ValueError(f"{name} has weights beyond float16 scales: save the checkpoint in bfloat16 first")
    return {"weight_packed": words, "weight_scale": stored, "weight_shape": torch.tensor(weight.shape)}


def _bytes_of_layers(state: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for name, tensor in state.items() if name.startswith(_LAYERS))


def _description(ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json. ignored: modules that are not quantised."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        "actorder": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
