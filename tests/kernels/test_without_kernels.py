"""Weights of few bits where our kernels do not run: the same numbers, multiplied by PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from layerskip_models import from_transformers
from layerskip_models.grouped_weight import GroupedLinear
from layerskip_models.kernels import library
from layerskip_models.linear import PlainLinear, int8_linear
from test_native import drawn
from tiny_llama import tiny_llama


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "kernels", lambda: None)


@pytest.mark.parametrize(("columns", "kind"), [(64, GroupedLinear), (384, GroupedLinear), (30, PlainLinear)])
def test_8_bits(columns: int, kind: type, no_kernels: None) -> None:
    """Rounded to the nearest of 255 multiples of each output's scale; inputs are not rounded."""
    weight, bias, x, residual = drawn(9, columns), drawn(9, seed=1), drawn(5, columns, seed=2), drawn(5, 9)
    weight[3] = 0
    linear = int8_linear(weight, bias)
    assert isinstance(linear, kind)
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
    assert ((linear.weight / scale) - (weight / scale).round()).abs().max() < 1e-4
    exact = F.linear(x.double(), linear.weight.double(), bias.double())
    torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=2e-5)
    torch.testing.assert_close(linear.add_to(residual, x).double(), exact + residual, rtol=0, atol=2e-5)
    if kind is GroupedLinear:
        assert linear.num_bytes < 1.2 * weight.numel() + 4 * len(weight)


def test_a_layout_that_does_not_exist_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"one of plain, int8, int4, native, got 'half': leave it out"):
        from_transformers(tiny_llama(), layout="half")  # type: ignore[arg-type]
    for layout in ("int8", "int4"):
        with pytest.raises(ValueError, match=f"layout '{layout}' needs a CPU and float32; this is cpu and float64"):
            from_transformers(tiny_llama(dtype=torch.float64), layout=layout)  # type: ignore[arg-type]
