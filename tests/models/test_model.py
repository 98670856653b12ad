"""The lean forward pass against transformers': whole texts, ranges of layers, rows in any grouping."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerskip_models.kv_cache import KVCache
from strategies import POOL_SIZE, tokens
from tiny_llama import full_logits, lean_logits, pool_model


@pytest.mark.parametrize(
    ("dtype", "bound", "index"),
    [
        pytest.param(dtype, bound, index, marks=pytest.mark.slow if index >= some else ())
        for dtype, bound, some in ((torch.float32, 1e-4, 24), (torch.float64, 1e-5, 8))
        for index in range(POOL_SIZE)
    ],
)
def test_logits_equal_transformers(dtype: torch.dtype, bound: float, index: int) -> None:
    """24 models have every shape of the pool: grouped queries, biases, tied embeddings, every rope, both layouts.

    8 of them have all but the layouts, which are float32's. Logits come back as float32.
    """
    text = [(7 * i + index) % 24 for i in range(40)]
    llama, engine = pool_model(index, dtype)
    torch.testing.assert_close(lean_logits(engine.model, text), full_logits(llama, text), rtol=1e-5, atol=bound)


@given(index=st.integers(0, 7), text=st.lists(tokens, min_size=2, max_size=24), data=st.data())
@settings(max_examples=50)
def test_rows_and_layers_in_any_grouping(index: int, text: list[int], data: st.DataObject) -> None:
    """Blocks of rows, each through layers [0, a) in one piece or row by row and [a, L) together, give the same rows."""
    _, engine = pool_model(index, torch.float64)
    model = engine.model
    whole = KVCache(model, len(text))
    layers: dict[int, Tensor] = {}
    model.run_layers(
        model.embed(torch.tensor(text)), 0, model.num_layers, whole, lambda layer, h: layers.update({layer: h})
    )
    assert sorted(layers) == list(range(1, model.num_layers + 1))
    cache = KVCache(model, len(text))
    start = 0
    while start < len(text):
        stop = data.draw(st.integers(start + 1, len(text)))
        split = data.draw(st.integers(1, model.num_layers - 1))
        low = [model.run_layers(model.embed(torch.tensor([token])), 0, split, cache) for token in text[start:stop]]
        hidden = torch.cat(low)
        kept = hidden.clone()
        top = model.run_layers(hidden, split, model.num_layers, cache)
        assert torch.equal(hidden, kept)  # the input is left as it was
        torch.testing.assert_close(hidden, layers[split][start:stop], rtol=0, atol=1e-10)
        torch.testing.assert_close(top, layers[model.num_layers][start:stop], rtol=0, atol=1e-10)
        start = stop
