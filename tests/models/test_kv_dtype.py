"""Rounded numbers beside the weights: keys and values in bfloat16, and rows in 8 bits."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from batched_runs import needs_native, shared_model
from bench.machine import WeightBytes
from layerskip_models import LayerSkipModel, from_transformers, load_model
from layerskip_models.draft_weights import drafter_of
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from matrix_models import NONE, VARIANTS, kernels_of, model_of, source_of
from selfspec import SelfSpecGenerator
from selfspec.analysis.inspection import arithmetic_in_words
from selfspec.cli.main import app
from tiny_llama import tiny_llama

PROMPT = [5, 1, 7, 3, 3, 9, 1]


def logits(model: LayerSkipModel, rows: int) -> torch.Tensor:
    tokens, cache = torch.arange(40) * 7 % 24, KVCache(model, 40)
    with torch.inference_mode():
        hidden = [model.run_layers(model.embed(part), 0, model.num_layers, cache) for part in tokens.split(rows)]
        return model.logits(torch.cat(hidden))


@pytest.mark.parametrize("layout", ["plain", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rounding_changes_little_and_something(layout: Layout, window: int | None, rows: int) -> None:
    """One row, which is attended by products of matrices, a few, and a prompt."""
    llama = tiny_llama(heads=4, kv_heads=2, seed=21)
    model = from_transformers(llama, layout=layout)
    rounded = model.with_kv_dtype("bfloat16")
    difference = (logits(rounded, rows) - logits(model, rows)).abs()
    assert 1e-4 < difference.max() < 0.3
    cache = KVCache(rounded, 10)
    assert cache.keys.dtype == cache.values.dtype == torch.bfloat16
    assert 2 * cache.num_bytes == KVCache(model, 10).num_bytes


@needs_native
def test_kernels_and_operators_agree_on_the_rounded_model() -> None:
    found = [
        logits(from_transformers(tiny_llama(heads=4, kv_heads=2, seed=21), layout=layout).with_kv_dtype("bfloat16"), 3)
        for layout in ("native", "plain")
    ]
    # A number that lies between two of bfloat16 may be rounded either way.
    torch.testing.assert_close(*found, rtol=0, atol=0.05)
    assert (found[0] - found[1]).abs().mean() < 2e-3


def test_what_it_may_be() -> None:
    model = shared_model("plain")  # float64
    assert model.kv_dtype == model.with_kv_dtype("auto").kv_dtype == model.with_kv_dtype(torch.float64).kv_dtype
    assert model.with_kv_dtype("bfloat16").with_kv_dtype("auto").kv_dtype == torch.float64
    assert model.with_adapters({}).with_kv_dtype("bfloat16").with_adapters({}).kv_dtype == torch.bfloat16
    for wrong in ("float32", "float16", "int8", torch.float16):
        with pytest.raises(ValueError, match=r"must be auto \(float64, which this model computes in\) or bfloat16"):
            model.with_kv_dtype(wrong)
        with pytest.raises(ValueError, match="kv_dtype must be"):
            SelfSpecGenerator(model, kv_dtype=wrong)


def test_every_road_to_it() -> None:
    """A transformers model, one that is loaded, one that has it: half the bytes, kept texts too, and the same text."""
    llama = tiny_llama(heads=4, kv_heads=2, late_scale=0.5, seed=21)
    rounded = from_transformers(llama, layout="plain").with_kv_dtype("bfloat16")
    full = SelfSpecGenerator(llama, policy="ls:2-3", prefix_cache="1MB")
    for given in (llama, rounded, from_transformers(llama, layout="plain")):
        generator = SelfSpecGenerator(given, prefix_cache="1MB", kv_dtype="auto" if given is rounded else "bfloat16")
        found = generator.generate(PROMPT, max_new_tokens=20, policy="ls:2-3")
        plain = generator.generate(PROMPT, max_new_tokens=20, policy="ar")
        assert found.new_tokens == plain.new_tokens
        assert 2 * found.stats.peak_cache_bytes == full.generate(PROMPT, max_new_tokens=20).stats.peak_cache_bytes
        assert 2 * generator._models.current.pool.row_bytes == full._models.current.pool.row_bytes
    assert WeightBytes.of(rounded).kv * 2 == WeightBytes.of(full.model).kv


FORMATS = {"Q4_0": {4: 8}, "int4": {4: 8}, "Q4_K_M": {4: 8, 6: 8}, "Q6_K": {6: 8}, "Q5_K": {6: 8}, "Q8_0": {8: 16}}


@pytest.mark.parametrize("weights", FORMATS)
def test_each_format_in_both_settings(weights: str) -> None:
    """Check that kernels and operators differ less from each other than from rows that are not rounded."""
    first = None
    for variant in VARIANTS:
        with kernels_of(variant):
            model, unrounded = model_of("llama", weights, variant).with_adapters({}), 32 if variant == NONE else 16
            said, exact = FORMATS[weights], model.with_rows(16)
            assert {*exact.row_bits.values()} == {unrounded}
            assert variant == NONE or said.items() <= model.row_bits.items()
            if 8 in said.values():
                model = model.with_rows(8) if variant == NONE else model
                made = logits(model, 3)
                first, moved = made if first is None else first, (made - logits(exact, 3)).abs().mean()
                assert torch.equal(logits(exact.with_rows(8), 3), made)
                assert 1e-4 < moved < 0.2 and (made - first).abs().mean() < moved / 3
                assert "with rows in 8" in arithmetic_in_words(model)
                if 4 not in said:  # copies to draft with, whose first layer keeps the model's weights
                    assert 16 not in {getattr(layer.qkv, "row_bits", 8) for layer in drafter_of(exact, 4).layers}
            else:
                with pytest.raises(ValueError, match="rows=8 changes nothing: it is for weights of 4 to 6 bits"):
                    model.with_rows(8)


@pytest.mark.parametrize(
    ("model", "rows", "message"), [("", "7", "rows must be 8 or 16"), ("demo", "16", "rows=16 changes nothing")]
)
def test_the_option(model: str, rows: str, message: str) -> None:
    path = str(source_of("llama", "Q4_0").path)
    assert load_model(path, device="cpu", rows=16).row_bits[4] > 8
    wrong = CliRunner().invoke(app, ["generate", "1", "--model", model or path, "--rows", rows])
    assert wrong.exit_code == 2 and f"error: {message}" in wrong.stderr
