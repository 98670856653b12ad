"""Writes checkpoints as others quantise them, by the published layouts: compressed-tensors and GPTQ.

Nothing here is shared with what reads them: numbers are packed one by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """Unsigned numbers [rows, n] as int32 words [rows, ceil(n * bits / 32)], the first in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(values.shape[0], -(-values.shape[1] // per_word), dtype=torch.int64)
    for column in range(values.shape[1]):
        words[:, column // per_word] += values[:, column].long() << (bits * (column % per_word))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def rounded(
    weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [out, in] as unsigned integers with scale and zero point [out, groups] each; groups: of each input, [in]."""
    count, top = int(groups.max()) + 1, 2**bits - 1
    scale, zero = (torch.empty(weight.shape[0], count) for _ in range(2))
    values = torch.empty_like(weight)
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            scale[:, group], zero[:, group] = part.abs().amax(1) / (top // 2), 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, group] = (high - low) / top
            zero[:, group] = (-low / scale[:, group]).round()
    scale = scale.to(scale_dtype).float().clamp_min(1e-6)
    values = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, top)
    return values.int(), scale.to(scale_dtype), zero.int()


def quantise_checkpoint(
    model: LlamaForCausalLM,
    folder: Path,
    method: str,
    *,
    bits: int = 4,
    group_size: int | None = 8,
    symmetric: bool = True,
    shuffled: bool = False,
    version: str = "gptq",
    scale_dtype: torch.dtype = torch.float16,
    packed_zeros: bool = True,
    head: bool = False,
) -> LlamaForCausalLM:
    """Write the model with its layers' matrices quantised; returns it with the float weights that the file stands for.

    method: "pack-quantized", "int-quantized" or "gptq". group_size: inputs that share a scale; None for all of a row.
    shuffled: the groups are of inputs that are not neighbours (GPTQ's desc_act). version: of GPTQ. packed_zeros: of
    "pack-quantized"; else zero points are bytes, as compressed-tensors wrote them before April 2025. head: is quantised, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del kept["lm_head.weight"]
    for name, weight in kept.items():
        if "_proj.weight" not in name and not (head and name == "lm_head.weight"):
            tensors[name] = weight
            continue
        module, columns = name.removesuffix(".weight"), weight.shape[1]
        groups = torch.arange(columns) // (group_size or columns)
        if shuffled:
            groups = groups[torch.randperm(columns, generator=generator)]
        values, scale, zero = rounded(weight, bits, groups, symmetric=symmetric, scale_dtype=scale_dtype)
        model.get_parameter(name).data = (values - zero[:, groups]).float() * scale.float()[:, groups]
        offset = 2 ** (bits - 1)
        if method == "gptq":
            stored = zero.t() - 1 if version == "gptq" else zero.t()
            parts = {
                "qweight": pack_rows(values, bits).t(),
                "qzeros": pack_rows(stored & (2**bits - 1), bits),
                "scales": scale.t(),
                "g_idx": groups.int(),
            }
        elif method == "pack-quantized":
            parts = {
                "weight_packed": pack_rows(values, bits),
                "weight_scale": scale,
                "weight_shape": torch.tensor(weight.shape),
            }
            if not symmetric:
                bytes_of = (zero - offset).to(torch.int8)
                parts["weight_zero_point"] = pack_rows(zero.t(), bits).t() if packed_zeros else bytes_of
        else:
            parts = {"weight": (values - offset).to(torch.int8), "weight_scale": scale}
            if not symmetric:
                parts["weight_zero_point"] = (zero - offset).to(torch.int8)
        if shuffled and method != "gptq":
            parts["weight_g_idx"] = groups.int()
        tensors.update({f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size or -1,
        "desc_act": shuffled,
    }
    if method != "gptq":
        settings = compressed_tensors_settings(method, bits, group_size, symmetric)
        settings["config_groups"]["group_0"]["weights"]["actorder"] = "group" if shuffled else None
    elif version != "gptq":
        settings["checkpoint_format"] = version
    described = {**model.config.to_dict(), "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return model


def compressed_tensors_settings(
    method: str = "pack-quantized", bits: int = 4, group_size: int | None = 8, symmetric: bool = True, **more: Any
) -> dict[str, Any]:
    """The `quantization_config` of such a checkpoint. more: fields of its only group."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": method,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
