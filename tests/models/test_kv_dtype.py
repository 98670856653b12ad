"""Keys and values in bfloat16: half the memory, the same text by every road, and nearly the model that it was."""

from __future__ import annotations

import pytest
import torch

from batched_runs import needs_native, shared_model
from bench.machine import WeightBytes
from layerskip_models import DEMO_PATH, LayerSkipModel, from_transformers, load_model
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from selfspec import SelfSpecGenerator
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


def test_checkpoints() -> None:
    assert load_model(DEMO_PATH, kv_dtype="bfloat16").kv_dtype == torch.bfloat16
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH, kv_dtype="bfloat16")
    assert generator.model.kv_dtype == torch.bfloat16
