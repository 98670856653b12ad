"""Looped models: logits at every loop's end against plain PyTorch, loops in one pass, caches of a loop, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip_models import LayerSkipModel, load_model
from layerskip_models.kv_cache import KVCache
from looped_models import LOOPED, boundary_logits, looped_fields, looped_weights, write_folder
from tiny_llama import VOCAB_SIZE

TEXT = [(7 * i * i + 3) % VOCAB_SIZE for i in range(30)]
every_model = pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in LOOPED for seed in range(4)])


def loaded(folder: Path, kind: str, seed: int, dtype: str = "float64", **own: Any) -> LayerSkipModel:
    said = looped_fields(kind, seed, VOCAB_SIZE, **own)
    write_folder(folder, said, looped_weights(said, seed))
    return load_model(folder, dtype=dtype, device="cpu")


@every_model
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-5), ("float32", 1e-4)])
def test_every_loop_ends_in_the_logits_of_a_plain_forward(kind, seed, dtype, bound, tmp_path) -> None:
    model = loaded(tmp_path, kind, seed, dtype)
    said = looped_fields(kind, seed, VOCAB_SIZE)
    expected = boundary_logits(said, looped_weights(said, seed), TEXT)
    assert model.num_loops == len(expected) and model.num_layers == model.num_loops * said["num_hidden_layers"]
    for rows in (1, 7, len(TEXT)):
        cache, found = KVCache(model, len(TEXT)), []
        for first in range(0, len(TEXT), rows):
            hidden, ends = model.embed(torch.tensor(TEXT[first : first + rows])), []
            for loop in range(model.num_loops):
                hidden = model.run_layers(hidden, loop * model.loop_layers, (loop + 1) * model.loop_layers, cache)
                ends.append(model.logits(hidden))
            found.append(torch.stack(ends))
        torch.testing.assert_close(torch.cat(found, 1), torch.stack(expected).float(), rtol=bound, atol=bound)
    with torch.inference_mode():
        whole = model.run_layers(model.embed(torch.tensor(TEXT)), 0, model.num_layers, KVCache(model, len(TEXT)))
        torch.testing.assert_close(model.logits(whole), expected[-1].float(), rtol=bound, atol=bound)


def ordinary_run(model: LayerSkipModel, tokens: list[int]) -> tuple[list[torch.Tensor], KVCache]:
    """The states before each loop and after the last, [rows, hidden], and the cache, of passes of one row each."""
    cache, size = KVCache(model, len(TEXT)), model.loop_layers
    states = []
    for token in tokens:
        rows = [model.embed(torch.tensor([token]))]
        for loop in range(model.num_loops):
            rows.append(model.run_layers(rows[-1], loop * size, (loop + 1) * size, cache))
        states.append(torch.stack(rows))
    return [*torch.cat(states, 1)], cache


def looped_run(model: LayerSkipModel, texts: list[list[int]]) -> list[tuple[list[torch.Tensor], KVCache]]:
    """The same of passes over one loop's layers, in each of which every text has one row in every loop."""
    caches, ahead = [KVCache(model, len(TEXT)) for _ in texts], model.num_loops - 1
    states = [torch.zeros(model.num_loops + 1, len(text), model.hidden_size, dtype=model.dtype) for text in texts]
    for text, kept in zip(texts, states):
        kept[0] = model.embed(torch.tensor(text))
    for sweep in range(max(map(len, texts)) + ahead):
        part = [
            (text, loop, sweep - loop)
            for text, tokens in enumerate(texts)
            for loop in range(ahead, -1, -1)
            if 0 <= sweep - loop < len(tokens)
        ]
        hidden = torch.stack([states[text][loop, row] for text, loop, row in part])
        out = model.run_layers(hidden, 0, model.loop_layers, [(caches[text].loop(loop), 1) for text, loop, _ in part])
        for (text, loop, row), one in zip(part, out):
            states[text][loop + 1, row] = one
    return [([*kept], cache) for kept, cache in zip(states, caches)]


@every_model
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rows_in_different_loops_share_a_pass(kind, seed, dtype, tmp_path) -> None:
    """Bit for bit on our kernels."""
    with torch.inference_mode():
        model = loaded(tmp_path, kind, seed, dtype)
        texts = [TEXT, TEXT[3:20], TEXT[:1]]
        for text, (states, cache) in zip(texts, looped_run(model, texts)):
            expected, whole = ordinary_run(model, text)
            assert cache.length == whole.length == len(text)
            for one, other in zip([*states, cache.values[:, :, : len(text)]], [*expected, whole.values[:, :, : len(text)]]):
                assert torch.equal(one, other) if model.kernels else torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_loops_cache_is_a_part_of_the_texts(tmp_path) -> None:
    model = loaded(tmp_path, "ouro", 1, num_hidden_layers=2, total_ut_steps=3, layer_types=None)
    cache = KVCache(model, 8)
    rows = model.embed(torch.tensor(TEXT[:4]))
    after = model.run_layers(rows, 0, 2, cache.loop(0))
    model.run_layers(after[:3], 0, 2, cache.loop(1))
    assert [cache.loop(loop).length for loop in range(3)] == [4, 3, 0] and cache.length == 0
    assert cache.position(0, 2) == 4 and cache.position(2, 4) == 3 and cache.loop(1) is cache.loop(1)
    cache.loop(0).roll_back(2)
    assert [cache.loop(loop).length for loop in range(3)] == [2, 3, 0]
    with pytest.raises(ValueError, match="hold different numbers of rows"):
        cache.position(0, 4)
    with pytest.raises(ValueError, match=r"layers \[0, 3\) of 2"):
        cache.loop(1).position(0, 3)
    with pytest.raises(ValueError, match=r"length must be in \[0, 3\]"):
        cache.loop(1).roll_back(4)
    with pytest.raises(ValueError, match="5 rows from position 4"):
        cache.loop(1).declare(4)
        cache.loop(1).room(0, 2, 5)
    cache.declare(1)
    assert [cache.loop(loop).length for loop in range(3)] == [1, 1, 1]
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=r"loop must be in \[0, 2\]"):
            cache.loop(wrong)
