"""Checkpoints that others quantised: read to the numbers that their files stand for, decoded as loaded, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models import from_transformers, load_model
from layerskip_models.checkpoints.loading import load_config, load_transformers
from layerskip_models.checkpoints.packed_weights import dequantise, unpack
from layerskip_models.checkpoints.schemes import Scheme
from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import LAYOUTS
from quantised_files import compressed_tensors_settings, quantise_checkpoint
from selfspec.integrations.hub_folder import export_hub
from test_products import CUT_ROWS
from tiny_llama import tiny_llama

CPU = torch.device("cpu")
NATIVE = native_works(CPU, torch.float32)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
VARIANTS: dict[str, dict[str, Any]] = {
    "packed, groups": {"method": "pack-quantized"},
    "packed, rows": {"method": "pack-quantized", "group_size": None},
    "packed, zero points": {"method": "pack-quantized", "symmetric": False},
    "packed, zero points of bytes": {"method": "pack-quantized", "symmetric": False, "packed_zeros": False},
    "packed, bytes of rows": {
        "method": "pack-quantized",
        "symmetric": False,
        "packed_zeros": False,
        "group_size": None,
    },
    "packed, 8 bits": {"method": "pack-quantized", "bits": 8, "symmetric": False, "group_size": None},
    "packed, reordered": {"method": "pack-quantized", "shuffled": True},
    "integers": {"method": "int-quantized", "bits": 8, "group_size": None},
    "integers, zero points": {"method": "int-quantized", "bits": 8, "group_size": None, "symmetric": False},
    "integers, groups": {"method": "int-quantized", "bits": 8, "symmetric": False},
    "integers, reordered": {"method": "int-quantized", "bits": 8, "symmetric": False, "shuffled": True},
    "gptq": {"method": "gptq"},
    "gptq, last group not full": {"method": "gptq", "group_size": 24},
    "gptq, zero points": {"method": "gptq", "symmetric": False},
    "gptq, reordered": {"method": "gptq", "symmetric": False, "shuffled": True},
    "gptq, second version": {"method": "gptq", "symmetric": False, "version": "gptq_v2"},
    "gptq, 8 bits": {"method": "gptq", "bits": 8, "group_size": None},
}


def small(**options: Any) -> LlamaForCausalLM:
    """Sizes that both layouts pack without a remainder, and rows that Q8_0 holds."""
    return tiny_llama(hidden_size=32, heads=2, kv_heads=1, head_dim=16, intermediate_size=64, seed=4, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_the_numbers_of_the_file(name: str, tmp_path: Path) -> None:
    meant = quantise_checkpoint(small(num_layers=2, tie_word_embeddings=name == "gptq"), tmp_path, **VARIANTS[name])
    found = load_transformers(tmp_path, dtype="float32", device="cpu")
    for key, weight in meant.state_dict().items():
        assert torch.equal(found.state_dict()[key], weight), key
    assert found.config.name_or_path == str(tmp_path)


IN_FOUR_BITS: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq"},
    "gptq, zero points": {"method": "gptq", "symmetric": False, "group_size": 64},
    "gptq, second version": {"method": "gptq", "symmetric": False, "version": "gptq_v2"},
    "packed, bfloat16": {"method": "pack-quantized", "scale_dtype": torch.bfloat16},
    "packed, zero points": {"method": "pack-quantized", "symmetric": False, "scale_dtype": torch.bfloat16},
    "packed, rows": {"method": "pack-quantized", "group_size": None, "symmetric": False, "scale_dtype": torch.float32},
}
NOT_IN_FOUR_BITS: dict[str, dict[str, Any]] = {
    "gptq, reordered": {"method": "gptq", "shuffled": True},
    "packed, reordered": {"method": "pack-quantized", "shuffled": True},
    "packed, float32": {"method": "pack-quantized", "scale_dtype": torch.float32},
    "small groups": {"method": "gptq", "group_size": 16},
    "8 bits": {"method": "gptq", "bits": 8},
}


def wide(**options: Any) -> LlamaForCausalLM:
    """Whose inputs are whole groups of 32 and 64."""
    shape = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
    return tiny_llama(**{**shape, "num_layers": 3, "seed": 4, "late_scale": 0.6, **options})


@pytest.mark.parametrize("name", IN_FOUR_BITS)
def test_4_bit_weights_keep_their_numbers(name: str, tmp_path: Path) -> None:
    """Every one, in fused matrices with interleaved rows; so hidden states are transformers'."""
    meant = quantise_checkpoint(wide(attention_bias=True), tmp_path, **{"group_size": 32, **IN_FOUR_BITS[name]})
    model, by_name = load_model(tmp_path, device="cpu"), load_model(tmp_path, dtype="int4", device="cpu")
    assert model.layer_bytes == by_name.layer_bytes < 0.7 * load_model(tmp_path, dtype="int8", device="cpu").layer_bytes
    for found, full in zip(model._layers, from_transformers(meant, layout="native" if NATIVE else "plain")._layers):
        for kind in ("qkv", "output", "gate_up", "down"):
            ours, theirs = getattr(found, kind), getattr(full, kind)
            assert 8 * ours.num_bytes < 5.6 * theirs.weight.numel()
            if NATIVE:
                assert torch.equal(ours.weight, theirs.weight), kind
    text = torch.tensor(PROMPT)
    states = meant.double().model(text[None]).last_hidden_state[0]
    hidden = model.run_layers(model.embed(text), 0, 3, KVCache(model, len(text)))
    bound = 3e-3 if model.kernels in CUT_ROWS else 1e-4
    torch.testing.assert_close(model._final_norm(hidden).double(), states, rtol=0, atol=bound)


@pytest.mark.parametrize("name", NOT_IN_FOUR_BITS)
def test_4_bit_weights_that_do_not_fit_are_rounded(name: str, tmp_path: Path) -> None:
    """To 8 bits; to 4 if these are asked for."""
    quantise_checkpoint(wide(num_layers=2), tmp_path, **{"group_size": 32, **NOT_IN_FOUR_BITS[name]})
    model, eight = load_model(tmp_path, device="cpu"), load_model(tmp_path, dtype="int8", device="cpu")
    assert model.layer_bytes == eight.layer_bytes
    text = torch.tensor(PROMPT)
    states = [one.run_layers(one.embed(text), 0, 2, KVCache(one, len(text))) for one in (model, eight)]
    assert torch.equal(*states)
    assert load_model(tmp_path, dtype="int4", device="cpu").layer_bytes < eight.layer_bytes


def test_a_matrix_that_the_file_left_as_it_is(tmp_path: Path) -> None:
    """Among the parts of a fused one: all of it is rounded to 8 bits, with the numbers that the 4-bit parts stand for."""
    quantise_checkpoint(wide(num_layers=2), tmp_path, "gptq", group_size=32)
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    module = "model.layers.1.self_attn.v_proj"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    save_file({**tensors, f"{module}.weight": torch.randn(64, 64)}, tmp_path / "model.safetensors")
    model, eight = load_model(tmp_path, device="cpu"), load_model(tmp_path, dtype="int8", device="cpu")
    for layer, other in zip(model._layers, eight._layers):
        same = [getattr(layer, kind).num_bytes == getattr(other, kind).num_bytes for kind in ("qkv", "output", "down")]
        assert same == [layer is model._layers[1], False, False]
    x = torch.randn(3, 64)
    assert torch.equal(model._layers[1].qkv(x), eight._layers[1].qkv(x))


def test_broken_scales_are_found(tmp_path: Path) -> None:
    quantise_checkpoint(wide(num_layers=2), tmp_path, "gptq", group_size=32)
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.scales"][1, 2] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"infinite scales, first in model.layers.1.mlp.up_proj: copy"):
        load_model(tmp_path, device="cpu")


def test_bits_from_the_lowest() -> None:
    # 0x87654321 holds 1, 2, .. 8 from its lowest four bits on, and 0x21, 0x43, 0x65, 0x87 in bytes; it is negative as int32.
    word = torch.tensor([[0x87654321 - 2**32]], dtype=torch.int32)
    assert unpack(word, 4, 7).tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert unpack(word, 8, 4).tolist() == [[0x21, 0x43, 0x65, 0x87]]


def test_gptq_by_hand() -> None:
    # 8 inputs of 1 output, hence one word down; 8 outputs would be needed to fill a word of zero points, which may be longer.
    # Stored zero point 6 means 7; input 0 is of group 1 with scale .5, the others of group 0 with scale 2.
    parts = {
        "qweight": torch.tensor([[0x76543210] * 8], dtype=torch.int32),
        "qzeros": torch.full((2, 1), 0x66666666, dtype=torch.int32),
        "scales": torch.tensor([[2.0] * 8, [0.5] * 8]),
        "g_idx": torch.tensor([1, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32),
    }
    assert dequantise(parts)[0].tolist() == [-3.5, -12.0, -10.0, -8.0, -6.0, -4.0, -2.0, 0.0]
    assert dequantise(parts, scheme=Scheme(first_version=False))[3].tolist() == [
        -3.0,
        -10.0,
        -8.0,
        -6.0,
        -4.0,
        -2.0,
        0.0,
        2.0,
    ]
    parts["qzeros"].fill_(-1)  # 15 stands for 0 in the first version, where 1 was subtracted within 4 bits
    assert dequantise(parts)[0, 7].item() == 14.0


@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name]["method"] != "gptq"])
def test_compressed_tensors_reads_the_same(name: str, tmp_path: Path) -> None:
    """The library of the format itself, on the same tensors."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    if VARIANTS[name].get("shuffled"):
        pytest.skip("its newer versions read no reordered groups")
    quantise_checkpoint(small(num_layers=2), tmp_path, **VARIANTS[name], scale_dtype=torch.float32)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(VARIANTS[name]["method"])
    module = "model.layers.1.mlp.down_proj."
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {key.removeprefix(module): tensor for key, tensor in tensors.items() if key.startswith(module)}
    theirs = compressor.decompress(dict(parts), scheme)["weight"]
    assert torch.equal(dequantise(parts), theirs)


def test_int8_is_the_default_and_other_dtypes_are_kept(tmp_path: Path) -> None:
    quantise_checkpoint(small(), tmp_path, "pack-quantized")
    ours, floats = load_model(tmp_path, device="cpu"), load_model(tmp_path, dtype="float32", device="cpu")
    by_name = load_model(tmp_path, dtype="int8", device="cpu")
    assert ours.layer_bytes == by_name.layer_bytes < floats.layer_bytes
    assert load_model(tmp_path, layout="plain", device="cpu").layer_bytes > floats.layer_bytes / 2
    assert load_model(tmp_path, dtype="bfloat16", device="cpu").weights_dtype == torch.bfloat16


@pytest.mark.skipif(not NATIVE, reason="needs the native kernels")
def test_symmetric_rows_of_8_bits_keep_their_numbers(tmp_path: Path) -> None:
    """Their scale is ours, so the second rounding rounds nothing, but for float32's last bit."""
    meant = quantise_checkpoint(small(), tmp_path, "int-quantized", bits=8, group_size=None, scale_dtype=torch.float32)
    weight = meant.model.layers[0].mlp.down_proj.weight.detach()
    out = LAYOUTS["int8"](weight, None)(torch.eye(weight.shape[1]))
    torch.testing.assert_close(out.t(), weight, rtol=1e-6, atol=0)


def _weights_of(**more: Any) -> dict[str, Any]:
    settings = compressed_tensors_settings("int-quantized", 8)
    settings["config_groups"]["group_0"]["weights"] |= more
    return settings


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "awq": ({"quant_method": "awq", "bits": 4}, "quantised by awq.*convert it to"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes.*model.dequantize()"),
    "fp8": ({"quant_method": "fp8"}, "quantised by fp8.*load the checkpoint that it was made from"),
    "unknown": ({"bits": 4}, "an unknown method"),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3}, "of 3 bits"),
    "gptq for marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "laid out for marlin"),
    "float weights": (compressed_tensors_settings("float-quantized", 8), "format is float-quantized"),
    "activations": (
        compressed_tensors_settings("int-quantized", 8, input_activations={"num_bits": 8, "dynamic": True}),
        "activations are quantised",
    ),
    "2 bits": (compressed_tensors_settings(bits=2), "of 2 bits"),
    "scales of blocks": (
        _weights_of(strategy="block", block_structure=[16, 16], group_size=None),
        "have scales by block",
    ),
    "blocks without a strategy": (
        _weights_of(strategy=None, group_size=None, block_structure="2x2"),
        "scales by block",
    ),
    "gptq in words of 16 bits": ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "packed in int16"),
    "gptq that is rotated": ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotated"),
    "gptq by another field": ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "laid out for marlin"),
    "weights of another type": (compressed_tensors_settings(weights=1), "quantization_config cannot be read"),
    "a pattern that is none": (compressed_tensors_settings(targets=["re:("]), "quantization_config cannot be read"),
    "a format of another type": ({**compressed_tensors_settings(), "format": 3}, "format is 3"),
    "FP4": (compressed_tensors_settings("nvfp4-pack-quantized"), "format is nvfp4-pack-quantized"),
    "cache": ({**compressed_tensors_settings(), "kv_cache_scheme": {"num_bits": 8}}, "quantised KV cache"),
    "sparse": ({**compressed_tensors_settings(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    "rotated": ({**compressed_tensors_settings(), "transform_config": {"config_groups": {"a": {}}}}, "rotated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    config = {**small().config.to_dict(), "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"(?s)cannot be loaded: .*{message}.*What to do:|{message}"):
        load_model(tmp_path)


def test_damaged_quantised_weights(tmp_path: Path) -> None:
    quantise_checkpoint(small(), tmp_path, "pack-quantized")
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    save_file({**tensors, scale: tensors[scale][:, :3].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj cannot be read: .*3 groups"):
        load_model(tmp_path)
    del tensors["model.layers.2.input_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks weights.*layers.2.input_layernorm"):
        load_model(tmp_path)


def test_tensors_that_nothing_reads(tmp_path: Path) -> None:
    """A second scale, or a bias that the configuration lacks, changes the model; zeros change nothing."""
    quantise_checkpoint(small(num_layers=2), tmp_path, "gptq")
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    for name in ("weight_global_scale", "bias"):
        more = {f"model.layers.0.mlp.up_proj.{name}": torch.ones(64)}
        save_file(tensors | more, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"no part of the model reads, 1 in all, first model.*up_proj\.{name}"):
            load_model(tmp_path, device="cpu")
    zeros = {"model.layers.0.mlp.up_proj.bias": torch.zeros(64)}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | zeros | old, tmp_path / "model.safetensors")
    load_model(tmp_path, device="cpu")


def test_quantised_files_without_their_configuration(tmp_path: Path) -> None:
    """transformers would make random weights in place of those that it doesn't find, and take bytes for floats."""
    for method in ("gptq", "int-quantized"):
        config = quantise_checkpoint(small(num_layers=2), tmp_path, method, bits=8).config
        config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"quantised weights, first of model.*no quantization_config"):
            load_model(tmp_path, device="cpu")
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    scales = [name for name in tensors if name.endswith(("_scale", "_zero_point"))]
    save_file({name: tensors[name] for name in tensors.keys() - {*scales}}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj\.weight in .*model\.safetensors is of type I8"):
        load_model(tmp_path, device="cpu")


def test_a_quantised_model_in_memory_and_a_hub_folder_are_refused(tmp_path: Path) -> None:
    model = quantise_checkpoint(small(), tmp_path, "gptq")
    with pytest.raises(ValueError, match="is quantised: transformers would"):
        export_hub(tmp_path, tmp_path / "out")
    model.config.quantization_config = load_config(tmp_path).quantization_config
    with pytest.raises(ValueError, match="give load_model"):
        from_transformers(model)
