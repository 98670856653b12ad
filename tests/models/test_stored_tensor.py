"""What is read from files a few rows at a time is what the whole file stands for, bit for bit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from layerskip_models import from_transformers, load_model
from layerskip_models.checkpoints import stored_tensor
from layerskip_models.checkpoints.fused_reading import read_eight_bits, read_floats, read_numbers
from layerskip_models.checkpoints.gguf_blocks import GROUPED, numbers_of_blocks
from layerskip_models.checkpoints.loading import load_transformers
from layerskip_models.checkpoints.read_ahead import ReadAhead, ReadFile
from layerskip_models.checkpoints.stored_tensor import FLOATS, StoredTensor, TensorReader
from layerskip_models.grouped_weight import GroupedWeight
from layerskip_models.kernels import library, native_linear
from layerskip_models.kernels.native_linear import NativeInt8Linear
from test_native import needs_native
from tiny_llama import tiny_llama

gguf = pytest.importorskip("gguf")
from bench.engines.gguf_file import write_gguf  # noqa: E402

ROWS, COLUMNS = 37, 512
FORMS = ["F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q3_K"]
"""Q3_K stands for those that the native library does not know."""
SCALES = {"Q6_K": (208,), "Q3_K": (108,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "IQ4_NL": (0,)}
"""Where the float16 numbers of a block are; otherwise at 0 and 2."""


def data_of(form: str, seed: int = 0) -> np.ndarray:
    """Any bits that are finite numbers, uint8 [ROWS, bytes of a row]."""
    rng = np.random.default_rng(seed)
    if form in FLOATS:
        numbers = torch.from_numpy(rng.standard_normal((ROWS, COLUMNS))).to(FLOATS[form])
        return numbers.view(torch.uint8).numpy()
    block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    data = rng.integers(0, 256, (ROWS, COLUMNS // block * width), np.uint8)
    for place in SCALES.get(form, (0, 2)):
        data.reshape(ROWS, -1, width)[:, :, place + 1] &= 0xBF  # no exponent of all ones
    return data


def meant(data: np.ndarray, form: str) -> Tensor:
    if form in FLOATS:
        return torch.from_numpy(data).view(FLOATS[form]).float()
    return torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[form])))


_opened: list[ReadFile | TensorReader] = []


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several rows at a time, and several threads."""
    monkeypatch.setattr(stored_tensor, "_PIECE", 2000)
    monkeypatch.setattr(stored_tensor, "_SHARE", 6000)
    yield
    while _opened:
        _opened.pop().close()


def stored(path: Path, data: np.ndarray, form: str, **options: Any) -> StoredTensor:
    """Behind a few other bytes."""
    path.write_bytes(b"before!" + data.tobytes())
    reader, file = TensorReader(), ReadFile(path)
    _opened.extend((reader, file))
    options = {"dtype": FLOATS.get(form, torch.float32), **options}
    return StoredTensor(
        reader=reader,
        file=file,
        begin=7,
        shape=(ROWS, COLUMNS),
        form=form,
        row_bytes=data.shape[1],
        checkpoint="a file",
        name="a tensor",
        **options,
    )


def same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert np.array_equal(found.view(torch.uint8).numpy(), expected.contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize("form", FORMS)
def test_floats(form: str, tmp_path: Path) -> None:
    """In the dtype that they are meant to have, whatever it is, and in another order of rows."""
    data = data_of(form)
    expected, order = meant(data, form), torch.randperm(ROWS)
    for dtype in {FLOATS.get(form, torch.float32), torch.float32, torch.bfloat16, torch.float64}:
        one = stored(tmp_path / "file", data, form, dtype=dtype)
        same_bits(one.tensor(), expected.to(dtype))
        turned = stored(tmp_path / "file", data, form, dtype=dtype, order=order)
        same_bits(turned.tensor(), expected.to(dtype)[order])
        assert one.is_exact == (dtype == FLOATS.get(form, torch.float32))


@needs_native
@pytest.mark.parametrize("form", FORMS)
def test_eight_bits_are_those_of_the_whole_matrix_in_float32(form: str, tmp_path: Path) -> None:
    """Two parts of one matrix, each in an order of its own, and rows of the whole that are mixed."""
    data = [data_of(form, seed) for seed in (1, 2)]
    order, places = torch.randperm(ROWS), torch.randperm(2 * ROWS)
    parts = [stored(tmp_path / "0", data[0], form, order=order), stored(tmp_path / "1", data[1], form)]
    floats = torch.cat([meant(data[0], form)[order], meant(data[1], form)])
    for own in (None, places):
        found = read_eight_bits(parts, own, None)
        expected = by_operators(floats)
        for ours, theirs in zip((found.stored, found._scale), expected):
            assert ours is not None
            same_bits(ours if own is None else ours[own], theirs)
    same_bits(read_floats(parts, places, torch.float32)[places].float(), floats)


def by_operators(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded as `NativeInt8Linear` does without the library's help, which is with PyTorch's operators."""
    with patch.object(native_linear, "eight_bits", lambda *arguments: False):
        linear = NativeInt8Linear(weight)
    assert linear._scale is not None
    return linear.stored, linear._scale


@needs_native
@pytest.mark.parametrize("variant", ["amx", "vnni", "avx512", "avx2", "neon", "baseline"])
def test_every_variant_rounds_alike(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variant not in library.runnable_variants():
        pytest.skip("this processor cannot run it")
    monkeypatch.setattr(library, "kernels", lambda: library.load(variant))
    for form in stored_tensor._KINDS:
        weight = meant(data_of(form), form)
        weight[3] = 0
        weight = weight[:, : COLUMNS - 5]  # the last vector is not full
        found = NativeInt8Linear(weight)
        assert found._scale is not None
        for ours, theirs in zip((found.stored, found._scale), by_operators(weight)):
            same_bits(ours, theirs)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("form", GROUPED)
def test_numbers_that_are_kept_stand_for_what_gguf_says(
    form: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with and without the native library; two parts, one in an order of its own, and rows that are mixed."""
    if not kernels:
        monkeypatch.setattr(library, "kernels", lambda: None)
    data, order, places = data_of(form), torch.randperm(ROWS), torch.randperm(2 * ROWS)
    parts = [stored(tmp_path / "0", data, form, order=order), stored(tmp_path / "1", data, form)]
    expected = meant(data, form)
    same_numbers(parts[1].quantised().values(), expected)
    same_numbers(parts[0].quantised().values(), expected[order])
    found = read_numbers(parts, places)
    assert found is not None
    same_numbers(found.values()[places], torch.cat([expected[order], expected]))
    same_numbers(GroupedWeight.cat([one.quantised() for one in parts]).values(), torch.cat([expected[order], expected]))
    assert numbers_of_blocks(torch.from_numpy(data), form).num_bytes == parts[0].quantised().num_bytes


def test_blocks_whose_offsets_float16_does_not_hold(tmp_path: Path) -> None:
    """32 times a scale of Q6_K may be too large."""
    data = {form: data_of(form) for form in ("Q4_K", "Q6_K")}
    data["Q6_K"].reshape(ROWS, -1, 210)[:, :, 208:] = np.full((ROWS, COLUMNS // 256, 1), 3000, np.float16).view(
        np.uint8
    )
    parts = [stored(tmp_path / form, one, form) for form, one in data.items()]
    whole = GroupedWeight.cat([part.quantised() for part in parts])
    same_numbers(whole.values(), torch.cat([meant(one, form) for form, one in data.items()]))


def same_numbers(found: Tensor, expected: Tensor) -> None:
    """Of the same bits, but for the sign of 0."""
    assert found.dtype == expected.dtype == torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize("forms", [*itertools.permutations(("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0"), 2)])
def test_parts_of_several_forms_are_one_weight(forms: tuple[str, str], tmp_path: Path) -> None:
    data = [data_of(form) for form in forms]
    parts = [stored(tmp_path / form, one, form) for form, one in zip(forms, data)]
    assert read_numbers(parts, None) is None
    whole = GroupedWeight.cat([part.quantised() for part in parts])
    same_numbers(whole.values(), torch.cat([meant(one, form) for form, one in zip(forms, data)]))


@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_are_not_finite_are_refused(form: str, tmp_path: Path) -> None:
    data = data_of(form)
    if form in FLOATS:
        torch.from_numpy(data).view(FLOATS[form])[20, 7] = torch.nan
    else:
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]][1]
        data.reshape(ROWS, -1, block)[20, 1, SCALES.get(form, (0, 2))[-1] + 1] = 0x7E  # a quiet NaN
    one = stored(tmp_path / "file", data, form)
    message = "a file holds NaN or infinite weights, first in a tensor"
    with pytest.raises(ValueError, match=message):
        one.tensor()
    if library.kernels() is not None:
        with pytest.raises(ValueError, match=message):
            read_eight_bits([one], None, None)
    if form in GROUPED:
        with pytest.raises(ValueError, match=message):
            one.quantised()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be asked to read ahead")
def test_each_byte_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: asked.append((begin, size)))
    (tmp_path / "weights").write_bytes(bytes(100))
    file, ahead = ReadFile(tmp_path / "weights"), ReadAhead()
    ahead.expect([(file, 60, 40), (file, 0, 60)])
    for begin in (60, 0):
        ahead.reached(file, begin, 5)
    file.close()
    assert asked == [(60, 40), (0, 60)]


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    one = stored(tmp_path / "file", data_of("F32"), "F32")
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(ROWS * COLUMNS)
    with pytest.raises(OSError, match="ends too early: copy or download it again"):
        one.tensor()


@needs_native
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16"])
def test_a_gguf_file_becomes_what_its_float32_numbers_become(kind: str, tmp_path: Path) -> None:
    """Every matrix of a Llama, whose queries and keys are in another order in the file, with and without a tied head."""
    shape: dict[str, Any] = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 192}
    for tied in (False, True):
        write_gguf(tiny_llama(**shape, seed=4, tie_word_embeddings=tied), tmp_path / "model.gguf", kind)
        full = load_transformers(tmp_path, dtype="float32", device="cpu")
        found: Any = load_model(tmp_path, dtype="int8", device="cpu")
        expected: Any = from_transformers(full, layout="int8")
        pairs = [(found._head, expected._head)]
        for ours, theirs in zip(found._layers, expected._layers):
            pairs += [(getattr(ours, name), getattr(theirs, name)) for name in ("qkv", "output", "gate_up", "down")]
        for ours, theirs in pairs:
            same_bits(ours.stored, theirs.stored)
            same_bits(ours._scale, theirs._scale)
        assert torch.equal(found.embed(torch.arange(24)), expected.embed(torch.arange(24)))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_safetensors_become_what_transformers_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    """Matrices are stored alike, in 16 bits where the file has 16, and the head that drafts uses, too."""
    tiny_llama(num_layers=2, seed=3, vocab_size=48).to(dtype).save_pretrained(tmp_path)
    found: Any = load_model(tmp_path, device="cpu")
    expected: Any = from_transformers(load_transformers(tmp_path, dtype="float32", device="cpu"))
    assert found._head.stored.dtype == dtype
    for ours, theirs in zip(found._layers, expected._layers):
        for name in ("qkv", "output", "gate_up", "down"):
            same_bits(getattr(ours, name).stored, getattr(theirs, name).stored)
    same_bits(found._head.stored, expected._head.stored)
    assert torch.equal(found.embed(torch.arange(48)), expected.embed(torch.arange(48)))
