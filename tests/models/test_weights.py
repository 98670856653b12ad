"""What is loaded from files is what the files stand for, bit for bit, with and without the native library."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from bench.engines.gguf_file import write_gguf
from fuzz_models import draw_config, random_model
from layerskip_models import from_transformers, load_model
from layerskip_models.checkpoints import finite
from layerskip_models.checkpoints.finite import copy_finite
from layerskip_models.checkpoints.gguf_blocks import GROUPED, float_rows, kept_rows, numbers_of_blocks
from layerskip_models.checkpoints.loading import load_transformers
from layerskip_models.checkpoints.weights import FLOATS, MappedFile
from layerskip_models.decoder_layer import Linear
from layerskip_models.draft_weights import rounded_linear
from layerskip_models.families import IN_TRANSFORMERS
from layerskip_models.grouped_weight import GroupedWeight, pack_sixes
from layerskip_models.kernels import library, weights
from layerskip_models.kernels.native_linear import (
    NativeGroupedLinear,
    NativeInt8Linear,
    NativeLinear,
    round_to_eight_bits,
)
from layerskip_models.linear import Layout
from test_native import every_variant, needs_native
from tiny_llama import tiny_llama

ROWS, COLUMNS = 37, 512
FORMS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q3_K"]
"""Q3_K stands for those that the native library does not know."""
SCALES = {"Q6_K": (208,), "Q3_K": (108,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "IQ4_NL": (0,)}
"""Where the float16 numbers of a block are; otherwise at 0 and 2."""
NAMES = ("qkv", "output", "gate_up", "down")


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a matrix is."""
    monkeypatch.setattr(weights, "_SHARE", 6000)
    monkeypatch.setattr(weights, "num_threads", lambda: 3)
    monkeypatch.setattr(finite, "_PIECE", 1500)


def data_of(form: str, seed: int = 0) -> Tensor:
    """Any bits that are finite numbers, uint8 [ROWS, bytes of a row]."""
    rng = np.random.default_rng(seed)
    block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    data = rng.integers(0, 256, (ROWS, COLUMNS // block * width), np.uint8)
    for place in SCALES.get(form, (0, 2)):
        data.reshape(ROWS, -1, width)[:, :, place + 1] &= 0xBF  # no exponent of all ones
    return torch.from_numpy(data)


def meant(data: Tensor, form: str) -> Tensor:
    return torch.from_numpy(np.array(gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[form])))


def same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert np.array_equal(found.view(torch.uint8).numpy(), expected.contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_rows_stand_for_what_gguf_says(form: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As floats, and as kept numbers but for the sign of 0; in their order and in another; NaN is found."""
    if not kernels:
        monkeypatch.setattr(library, "kernels", lambda: None)
    data, order = data_of(form), torch.randperm(ROWS)
    expected = meant(data, form)
    broken = data.clone()
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]][1]
    broken.view(ROWS, -1, block)[20, 1, SCALES.get(form, (0, 2))[-1] + 1] = 0x7E  # a quiet NaN
    for turned in (None, order):
        floats = float_rows(data, form, turned)
        assert floats is not None
        same_bits(floats, expected if turned is None else expected[turned])
        assert float_rows(broken, form, turned) is None
        if form in GROUPED:
            kept = kept_rows([data], form, turned)
            assert kept is not None and kept.num_bytes == numbers_of_blocks(data, form).num_bytes
            assert torch.equal(kept.values(), expected if turned is None else expected[turned])
            assert kept_rows([broken], form, turned) is None


@needs_native
@pytest.mark.parametrize("form", GROUPED)
def test_rows_of_a_matrix_are_those_that_gguf_says(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, from 16 outputs side by side and from rows of their own, in each variant."""
    data, outputs = torch.cat([data_of(form), data_of(form, seed=1)])[:64], torch.randperm(64)[:40]
    for variant in library.runnable_variants():
        monkeypatch.setattr(library, "kernels", lambda variant=variant: library.load(variant))
        for reorder in (True, False):
            kept = kept_rows([data[:30], data[30:]], form, interleave=reorder)
            assert kept is not None
            same_bits(NativeGroupedLinear(kept, reorder=reorder).rows(outputs), meant(data, form)[outputs])


@pytest.mark.parametrize("forms", [*itertools.permutations(GROUPED, 2)])
def test_parts_of_several_forms_are_one_weight(forms: tuple[str, str]) -> None:
    """Also where 32 times a scale of Q6_K is too large for the offsets, which are float16."""
    for large in (False, True):
        data = [data_of(form) for form in forms]
        if large and "Q6_K" in forms:
            scales = data[forms.index("Q6_K")].view(ROWS, -1, 210)[:, :, 208:]
            scales[:] = torch.tensor([3000], dtype=torch.float16).view(torch.uint8)
        whole = GroupedWeight.cat([numbers_of_blocks(one, form) for form, one in zip(forms, data)])
        assert torch.equal(whole.values(), torch.cat([meant(one, form) for form, one in zip(forms, data)]))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("own", FLOATS.values())
def test_floats_are_copied_and_looked_at(
    own: torch.dtype, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any place in a file, to any dtype."""
    if not kernels:
        monkeypatch.setattr(library, "kernels", lambda: None)
    numbers = torch.randn(ROWS, COLUMNS, dtype=torch.float64).to(own)
    broken = numbers.clone()
    broken[20, 7] = torch.inf
    for begin in (0, 7, 16):
        for values, fine in ((numbers, True), (broken, False)):
            path = tmp_path / f"{begin} {fine}"
            path.write_bytes(bytes(begin) + values.view(torch.uint8).numpy().tobytes())
            source = MappedFile(path).tensor(begin, own, (ROWS, COLUMNS))
            same_bits(source, values)
            for dtype in {own, torch.float32, torch.bfloat16}:
                for places in (torch.arange(2, ROWS + 2), torch.randperm(ROWS)):
                    target = torch.empty(ROWS + 2, COLUMNS, dtype=dtype)
                    assert copy_finite(source, target, places) == fine
                    assert copy_finite(source, target, places, checks=False)
                    assert torch.equal(target[places], values.to(dtype))


@needs_native
@every_variant
def test_every_variant_rounds_alike(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare every variant's rounding with PyTorch's operators'."""
    weight = torch.randn(ROWS, COLUMNS - 5)  # the last vector is not full
    weight[3] = 0
    for own in (weight, weight.bfloat16(), weight.half()):
        found = []
        for chosen in (library.load(variant), None):
            monkeypatch.setattr(library, "kernels", lambda chosen=chosen: chosen)
            found.append(round_to_eight_bits(own))
        for ours, theirs in zip(*found):
            same_bits(ours, theirs)


def same_models(found: Any, expected: Any) -> None:
    """Every buffer of the matrices, and what tokens are embedded as."""
    pairs = [(found.head, expected.head), (found.draft_head, expected.draft_head)]
    pairs += [(getattr(a, name), getattr(b, name)) for a, b in zip(found.layers, expected.layers) for name in NAMES]
    for ours, theirs in pairs:
        assert type(ours) is type(theirs)
        buffers = (one.tensors if isinstance(one, NativeLinear) else [one.weight] for one in (ours, theirs))
        for mine, other in zip(*buffers, strict=True):
            same_bits(mine, other)
    tokens = torch.arange(24)
    assert torch.equal(found.embed(tokens), expected.embed(tokens))


def overwrite(folder: Path) -> None:
    """Write zeros to files in place, which a model that still has them mapped would compute with."""
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".gguf"):
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))


@pytest.mark.parametrize("layout", [None, "plain", "int8", "int4"])
@pytest.mark.parametrize("kind", IN_TRANSFORMERS)
def test_a_file_is_the_module_that_it_was_saved_from(kind: str, layout: Layout | None, tmp_path: Path) -> None:
    """For every family, in each layout, whether the module keeps its weights or gives them away."""
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        config = draw_config(Random(f"{kind} {seed}"), kind, 24)
        module: Any = random_model(config, late_scale=0.5, sharpness=1.5, seed=3).to(dtype)
        folder = tmp_path / str(dtype)
        module.save_pretrained(folder, max_shard_size="20KB")
        found = load_model(folder, dtype="float32", layout=layout, device="cpu")
        expected = from_transformers(load_transformers(folder, dtype="float32", device="cpu"), layout=layout)
        in_own = load_model(folder, dtype=dtype, layout=layout, device="cpu")
        assert in_own.weights_dtype == (in_own.dtype if layout in ("int8", "int4") else dtype)
        overwrite(folder)
        same_models(found, expected)
        same_models(in_own, from_transformers(module, layout=layout))
        same_models(in_own, from_transformers(module, layout=layout, release=True))


@needs_native
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16"])
def test_a_gguf_file_becomes_what_its_float32_numbers_become(kind: str, tmp_path: Path) -> None:
    """Every matrix of a Llama, whose queries and keys are in another order in the file, with and without a tied head."""
    shape: dict[str, Any] = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
    for tied in (False, True):
        write_gguf(tiny_llama(**shape, seed=4, tie_word_embeddings=tied), tmp_path / "model.gguf", kind)
        full = load_transformers(tmp_path, dtype="float32", device="cpu")
        models = {
            layout: load_model(tmp_path, dtype="float32", layout=layout, device="cpu") for layout in ("plain", "int8")
        }
        overwrite(tmp_path)
        for layout, found in models.items():
            same_models(found, from_transformers(full, layout=layout))


@needs_native
@pytest.mark.parametrize("outputs", [64, 37])
@pytest.mark.parametrize("bits", [8, 6])
def test_weights_of_few_bits_are_rounded_to_four_from_what_they_stand_for(outputs: int, bits: int) -> None:
    weight = (
        torch.randn(outputs, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 0, outputs)[:, None]
    )
    linear: Linear = NativeInt8Linear(weight)
    if bits == 6:
        peaks = weight.abs().amax(1, keepdim=True) / 31
        packed = pack_sixes((weight / peaks).round() + 32)
        linear = NativeGroupedLinear(GroupedWeight(packed, peaks.repeat(1, 8), bits=6, zero=32))
    found = rounded_linear(linear, 4)
    assert isinstance(found, NativeGroupedLinear)
    assert ((found.weight - weight).norm(dim=1) < 0.15 * weight.norm(dim=1)).all()
