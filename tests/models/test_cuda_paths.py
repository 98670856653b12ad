"""What differs on CUDA, on a CPU: layouts of attention's results, rotary in real numbers, masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.checkpoints import conversion
from layerskip_models.kv_cache import KVCache
from tiny_llama import full_logits, tiny_llama

TEXT = [3, 8, 1, 0, 22, 5, 7]
SHAPES = [(2, 1), (4, 2), (4, 4)]  # heads, key-value heads


def as_on_cuda(llama: LlamaForCausalLM) -> LayerSkipModel:
    """The lean model, on the paths that it takes on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "interleaves", lambda device: False)
        model = from_transformers(llama, layout="plain")
    for name, value in (("_unfused", False), ("_groups_rows", True)):
        assert hasattr(model.operators, name)  # or nothing would be switched
        setattr(model.operators, name, value)
    return model


@pytest.fixture
def cuda_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's result as its CUDA kernels lay it out: [batch, rows, heads, head_dim] in memory, then transposed."""
    plain = F.scaled_dot_product_attention

    def attention(*args: Any, **options: Any) -> Tensor:
        return plain(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


@pytest.mark.usefixtures("cuda_layout")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_rows_in_any_number_on_the_paths_of_cuda(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """One row, several at the text's beginning and several behind others."""
    llama = tiny_llama(heads=heads, kv_heads=kv_heads, dtype=dtype, seed=3)
    model = as_on_cuda(llama)
    cache = KVCache(model, 16)
    with torch.inference_mode():
        hidden = model.embed(torch.tensor(TEXT))
        states = [model.run_layers(hidden[start:stop], 0, 4, cache) for start, stop in ((0, 3), (3, 4), (4, 7))]
        bound = 0.3 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(model.logits(torch.cat(states)), full_logits(llama, TEXT), rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.0), (torch.float16, 0.0)]
)
def test_rotary_in_real_numbers_is_the_complex_one(dtype: torch.dtype, bound: float) -> None:
    llama = tiny_llama(heads=4, kv_heads=2, dtype=dtype, seed=3)
    theirs, ours = from_transformers(llama, layout="plain"), as_on_cuda(llama)
    theirs.operators._half = dtype.itemsize == 2  # on a CPU such a model computes in float32, on CUDA in its own dtype
    theirs.prepare(32)
    ours.prepare(32)
    assert theirs.rotary.is_complex()
    assert not ours.rotary.is_complex()
    heads = torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    halves = heads.unflatten(-1, (2, -1))
    expected, found = rearrange(halves, "... half pair -> ... (pair half)").clone(), heads.clone()
    positions = torch.tensor([0, 7, 7, 30, 2])
    theirs.operators._rotate(expected, 6, theirs.rotary[positions])
    ours.operators._rotate(found, 6, ours.rotary[positions])
    pairs = rearrange(found, "... (half pair) -> ... (pair half)", half=2)
    torch.testing.assert_close(pairs, expected, rtol=0, atol=bound)
    assert torch.equal(found[:, 6:], heads[:, 6:])
    assert not torch.equal(found[1:, :6], heads[1:, :6])


def test_masks_have_rows_of_a_multiple_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kernel that takes them copies them in every layer."""
    strides: list[int] = []
    plain = F.scaled_dot_product_attention

    def attention(*args: Any, **options: Any) -> Tensor:
        if options.get("attn_mask") is not None:
            strides.append(options["attn_mask"].stride(-2))
        return plain(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for heads, kv_heads in ((4, 4), (4, 2)):
        model = as_on_cuda(tiny_llama(heads=heads, kv_heads=kv_heads, seed=3))
        cache = KVCache(model, 13)
        with torch.inference_mode():
            hidden = model.embed(torch.tensor(TEXT))
            for start, stop in ((0, 4), (4, 7)):
                model.run_layers(hidden[start:stop], 0, 4, cache)
    assert len(strides) > 6
    assert all(stride % 8 == 0 for stride in strides), strides
