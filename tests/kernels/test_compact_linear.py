"""Weights in fewer bits: float16 where that loses nothing, 8 bits with rows that do not touch each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerskip_models import from_transformers
from layerskip_models.compact_linear import HalfLinear, Int8Linear, fits_half, half_works, int8_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import default_layout, possible_layouts
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from tiny_llama import full_logits, tiny_llama

CPU = torch.device("cpu")
needs_half = pytest.mark.skipif(not half_works(CPU, torch.float32), reason="this build has no float16 kernel")
needs_int8 = pytest.mark.skipif(not int8_works(CPU, torch.float32), reason="this build has no 8-bit kernel")


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_what_fits_into_half() -> None:
    assert fits_half(drawn(6, 5).bfloat16().float())
    assert fits_half(drawn(6, 5, scale=1e-12).bfloat16().float())  # by a power of two
    assert fits_half(drawn(6, 5, scale=1e12).bfloat16())
    assert fits_half(torch.zeros(3, 3))
    assert not fits_half(drawn(6, 5))  # 24 bits of mantissa
    assert not fits_half(torch.tensor([[1.0, 2.0**-45]]))  # no power of two holds both
    assert not fits_half(torch.tensor([[1.0, float("inf")]]))
    assert not fits_half(torch.tensor([[1.0, float("nan")]]))


@needs_half
@given(seed=st.integers(0, 1000), rows=st.integers(1, 20), exponent=st.integers(-20, 20), bias=st.booleans())
@settings(max_examples=60)
def test_half_computes_in_float32(seed: int, rows: int, exponent: int, bias: bool) -> None:
    """No further from the exact product than float32's own is."""
    weight = (drawn(17, 33, seed=seed) * 2.0**exponent).bfloat16().float()
    x, residual = drawn(rows, 33, seed=seed + 1), drawn(rows, 17, seed=seed + 2, scale=2.0**exponent)
    shift = drawn(17, seed=seed + 3, scale=2.0**exponent) if bias else None
    linear = HalfLinear(weight, shift)
    exact = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
    torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=2e-5 * 2.0**exponent)
    kept = residual.clone()
    torch.testing.assert_close(linear.add_to(residual, x).double(), exact + residual, rtol=0, atol=2e-5 * 2.0**exponent)
    assert torch.equal(residual, kept)


@needs_half
def test_half_refuses_what_it_would_round() -> None:
    with pytest.raises(ValueError, match="without loss"):
        HalfLinear(drawn(4, 4))
    assert "half" not in possible_layouts(drawn(4, 4))
    assert "half" in possible_layouts(drawn(4, 4).bfloat16().float())
    assert "int8" not in possible_layouts(drawn(4, 4).bfloat16().float())


@needs_half
def test_without_our_kernels_large_weights_stay_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip_models.linear.native_works", lambda *_: False)
    assert default_layout(drawn(512, 512).bfloat16().float()) == "half"
    assert default_layout(drawn(512, 512)) == default_layout(drawn(64, 64).bfloat16().float()) == "plain"


@needs_half
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_half_is_the_same_model(dtype: torch.dtype, tied: bool) -> None:
    llama = tiny_llama(dtype=torch.bfloat16, seed=2, attention_bias=True, tie_word_embeddings=tied).to(dtype)
    model = from_transformers(llama, layout="half")
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    hidden = model.run_layers(model.embed(torch.tensor(text)), 0, model.num_layers, KVCache(model, len(text)))
    assert hidden.dtype == torch.float32 == model.embed_one(3).dtype
    llama = llama.float()
    torch.testing.assert_close(model.logits(hidden), full_logits(llama, text), rtol=1e-5, atol=1e-4)
    assert torch.equal(model.embed_one(3), llama.model.embed_tokens.weight[3:4])


@needs_int8
@given(seed=st.integers(0, 1000), rows=st.integers(2, 12))
@settings(max_examples=40)
def test_int8_rows_do_not_touch_each_other(seed: int, rows: int) -> None:
    """Bit for bit, though the kernel rounds all rows within one range; a row of zeros and a huge one among them."""
    linear = Int8Linear(drawn(19, 30, seed=seed), drawn(19, seed=seed + 1))
    x = drawn(rows, 30, seed=seed + 2) * torch.logspace(-3, 4, rows)[:, None]
    x[0] = 0
    together = linear(x)
    assert torch.equal(together, torch.cat([linear(x[i : i + 1]) for i in range(rows)]))
    assert torch.equal(together[0], drawn(19, seed=seed + 1))
    assert torch.equal(linear.add_to(together, x), together + together)


@needs_int8
def test_int8_is_close_and_passes_nan_on() -> None:
    weight, x = drawn(64, 256), drawn(5, 256, seed=1)
    result, exact = Int8Linear(weight)(x), F.linear(x, weight)
    assert float((result - exact).norm() / exact.norm()) < 0.02
    x[1, 7] = float("nan")
    assert Int8Linear(weight)(x).isnan().any(dim=1).tolist() == [False, True, False, False, False]


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_speculation_gives_the_int8_model_s_own_output(dtype: torch.dtype) -> None:
    """Every policy, against the same weights decoding token by token; a difference must be a near-tie of its logits.

    Half of the policies for each of two models.
    """
    near_ties = tokens = 0
    bound = 1e-3 if dtype == torch.float32 else 0.2
    for seed in range(2):
        llama = tiny_llama(num_layers=4, dtype=dtype, seed=seed, hidden_size=16, intermediate_size=20)
        engine = SelfSpecGenerator(from_transformers(llama, layout="int8"))
        model = engine.model
        prompt = [seed, 3, 20 - seed]
        for name in EVERY_POLICY[seed::2]:
            new = engine.generate(prompt, max_new_tokens=20, policy=named_policy(name, 2, model)).new_tokens
            text = torch.tensor(prompt + new)
            logits = model.logits(model.run_layers(model.embed(text), 0, 4, KVCache(model, len(text))))
            own = logits[len(prompt) - 1 : -1]
            gaps = own.max(dim=-1).values - own.gather(-1, torch.tensor(new)[:, None])[:, 0]
            assert float(gaps.max()) <= bound, name
            near_ties += int((gaps > 0).sum())
            tokens += len(new)
    assert near_ties <= tokens // 20


def test_a_layout_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="int8"):
        from_transformers(tiny_llama(dtype=torch.float64), layout="int8")


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind", [pytest.param(HalfLinear, marks=needs_half), pytest.param(Int8Linear, marks=needs_int8)]
)
def test_a_default_dtype_changes_nothing(kind: type, default: torch.dtype) -> None:
    """Factors that are small must not become 0 because PyTorch's default dtype holds no smaller ones."""
    weight, x = drawn(6, 5, scale=1e-12).bfloat16().float(), torch.zeros(2, 5)
    x[1] = drawn(5, seed=1)
    expected = kind(weight)(x)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        result = kind(weight)(x)
    finally:
        torch.set_default_dtype(before)
    assert result.dtype == torch.float32 and torch.equal(result, expected)
