"""A model in 4 bits as compressed-tensors: the format, and that what is read back is what was rounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from layerskip_models import load_model
from layerskip_models.checkpoints.four_bit_writing import write_in_four_bits
from layerskip_models.checkpoints.loading import load_transformers
from layerskip_models.checkpoints.packed_weights import in_four_bits, modules_of
from layerskip_models.four_bit_rounding import round_to_four_bits
from layerskip_models.grouped_weight import unpack_nibbles
from quantised_files import pack_rows
from selfspec import SelfSpecGenerator
from tiny_llama import reference_greedy, tiny_llama


def fitting(**options: Any) -> LlamaForCausalLM:
    """Every matrix has a multiple of 64 inputs."""
    return tiny_llama(**{"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "num_layers": 3, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_the_files_are_as_the_format_says(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = fitting(dtype=dtype, tie_word_embeddings=tied, attention_bias=True)
    write_in_four_bits(model, tmp_path)
    scales = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    expected = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_proj.weight")}
    if tied:
        del expected["lm_head.weight"]
    for name, tensor in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            continue
        rounded = round_to_four_bits(tensor, group=32, symmetric=True)
        assert rounded.factors is None
        module = name.removesuffix(".weight")
        expected[f"{module}.weight_packed"] = pack_rows(unpack_nibbles(rounded.packed), 4)
        expected[f"{module}.weight_scale"] = rounded.groups.to(scales)
        expected[f"{module}.weight_shape"] = torch.tensor(tensor.shape)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    said = config["quantization_config"]
    (group,) = said["config_groups"].values()
    assert (said["quant_method"], said["format"], said["ignore"]) == (
        "compressed-tensors",
        "pack-quantized",
        ["lm_head"],
    )
    assert group["targets"] == ["Linear"] and group["input_activations"] is None
    weights = group["weights"]
    assert [weights[name] for name in ("num_bits", "type", "symmetric", "strategy", "group_size")] == [
        4, "int", True, "group", 32
    ]  # fmt: skip
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_read_back_with_the_same_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    """By both of our readers: as floats, and kept in 4 bits; and the text is that of the floats."""
    model = fitting(dtype=dtype, tie_word_embeddings=True)
    write_in_four_bits(model, tmp_path)
    floats = load_transformers(tmp_path, dtype="float32", device="cpu")
    original = model.state_dict()
    for name, tensor in floats.state_dict().items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(tensor, original[name].float()), name
            continue
        weight = original[name].float()
        rounded = round_to_four_bits(original[name], group=32, symmetric=True)
        scale = rounded.groups.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16).float()
        numbers = unpack_nibbles(rounded.packed).float() - 8
        assert torch.equal(tensor, numbers * scale.repeat_interleave(32, dim=1)), name
        assert (
            0.02 < ((tensor - weight).norm() / weight.norm()).item() < 0.12
        )  # 4 bits of normal weights lose about 0.08
    stored = load_file(tmp_path / "model.safetensors")
    for module, parts in modules_of(stored).items():
        kept = in_four_bits({part: stored[f"{module}.{part}"] for part in parts})
        assert kept is not None and torch.equal(kept.values(), floats.state_dict()[f"{module}.weight"])
    loaded, prompt = load_model(tmp_path, dtype="float32"), [3, 1, 4, 1, 5]
    result = SelfSpecGenerator(loaded, policy="ls:1-2").generate(
        torch.tensor(prompt), max_new_tokens=24, do_sample=False
    )
    assert result.new_tokens == reference_greedy(floats, prompt, max_new_tokens=24)


def test_what_its_layers_take(tmp_path: Path) -> None:
    """A layer: q and o 64 x 64, k and v 32 x 64, the MLP 3 x 64 x 128, two norms of 64.

    That is 36,864 weights and 128 of norms, in float32 4 x 36,992 bytes. In 4 bits with 16 for each 32: 36,864 x 4.5 / 8, the
    norms as before, and 7 shapes of 16 bytes.
    """
    share = write_in_four_bits(fitting(), tmp_path)
    assert share == pytest.approx((36864 * 4.5 / 8 + 4 * 128 + 7 * 16) / (4 * 36992))


def test_matrices_that_do_not_fit_stay_and_are_named(tmp_path: Path) -> None:
    model = fitting(intermediate_size=72)
    write_in_four_bits(model, tmp_path)
    stays = [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert sorted(config["quantization_config"]["ignore"]) == ["lm_head", *stays]
    floats = load_transformers(tmp_path, dtype="float32", device="cpu").state_dict()
    for name in stays:
        assert torch.equal(floats[f"{name}.weight"], model.state_dict()[f"{name}.weight"])
    assert not torch.equal(
        floats["model.layers.0.mlp.up_proj.weight"], model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    )


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no matrix of this model fits 4 bits"):
        write_in_four_bits(tiny_llama(intermediate_size=24), tmp_path)
    large = fitting()
    large.model.layers[1].mlp.up_proj.weight.data[3] *= 1e8
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj has weights beyond float16 scales.*bfloat16"):
        write_in_four_bits(large, tmp_path)
    write_in_four_bits(large.bfloat16(), tmp_path)
    found = load_transformers(tmp_path, dtype="float32", device="cpu").state_dict()
    row = large.state_dict()["model.layers.1.mlp.up_proj.weight"][3].float()
    error = found["model.layers.1.mlp.up_proj.weight"][3] - row
    assert (error.norm() / row.norm()).item() < 0.12
