"""16-bit models on a CPU: their weights as they are, float32 arithmetic, so a text depends on model and prompt alone."""

from __future__ import annotations

import pytest
import torch

from layerskip_models import from_transformers
from layerskip_models.checkpoints.conversion import arithmetic_dtype
from layerskip_models.linear import default_layout
from tiny_llama import tiny_llama

HALVES = [torch.bfloat16, torch.float16]
PROMPTS = [[5, 1, 7], [2], [9, 9, 3, 0, 23, 4, 4, 1], list(range(20))]
needs_kernels = pytest.mark.skipif(
    default_layout(torch.zeros(4, 4)) != "native", reason="without our kernels rows may differ in the last bits"
)


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_weights_stay_16_bits(dtype: torch.dtype) -> None:
    llama = tiny_llama(dtype=dtype, seed=1)
    model = from_transformers(llama)
    assert model.embed_one(3).dtype == torch.float32
    assert torch.equal(model.embed_one(3), llama.model.embed_tokens.weight[3:4].float())
    if dtype == torch.bfloat16 and default_layout(torch.zeros(4, 4)) != "plain":
        full = from_transformers(tiny_llama(dtype=dtype, seed=1).float(), layout="plain")
        assert 2 * (model.layer_bytes - 2 * 16 * 4) == full.layer_bytes - 2 * 16 * 4  # two norms of 16 stay float32


def test_arithmetic() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for dtype in HALVES:
        assert arithmetic_dtype(dtype, cpu) == torch.float32
        assert arithmetic_dtype(dtype, cuda) == dtype
    assert arithmetic_dtype(torch.float64, cpu) == torch.float64
    assert arithmetic_dtype(torch.float32, cpu) == torch.float32
