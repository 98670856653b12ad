"""Half a layer at a time on our kernels: the same bits as whole layers, whatever shares the pass; and whose core is whose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerskip_models import LayerSkipModel, load_model
from layerskip_models.backends import tensor_parallel
from layerskip_models.families import FAMILIES
from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.parallel import ranks
from layerskip_models.parallel.cores import share_of
from layerskip_models.parallel.shard_loading import load_shard
from rank_processes import results_of
from selfspec import SelfSpecGenerator
from test_families import reference
from tiny_llama import VOCAB_SIZE, tiny_llama

needs_native = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")
TOKENS = torch.randint(0, VOCAB_SIZE, (140,), generator=torch.Generator().manual_seed(7))
PROMPTS = ([5, 1, 7], [9, 9, 3, 0, 23], [2], [4, 4, 8, 1])


def states(model: LayerSkipModel, tokens: Tensor = TOKENS) -> list[NDArray[Any]]:
    """After every layer, in one piece, in several, and beside other texts; arrays, which go through a pipe as they are."""
    found: list[Tensor] = []

    def walk(sizes: list[int], caches: list[KVCache]) -> None:
        rows = torch.cat([tokens[cache.length : cache.length + size] for cache, size in zip(caches, sizes)])
        seen: list[Tensor] = []
        with torch.inference_mode():
            last = model.run_layers(
                model.embed(rows), 0, model.num_layers, [*zip(caches, sizes)], lambda done, hidden: seen.append(hidden)
            )
        assert torch.equal(seen[-1], last)
        found.append(torch.stack(seen).split(sizes, dim=1)[0].clone())

    for pieces in ([len(tokens)], [3, 1, 1, len(tokens) - 5]):
        cache = KVCache(model, len(tokens))
        for size in pieces:
            walk([size], [cache])
    caches = [KVCache(model, len(tokens)) for _ in range(3)]
    for sizes in ([5, 1, 9], [1, 1, 1], [len(tokens) - 6, 2, 1]):
        walk(sizes, caches)
    whole, pieces, batch_size = found[:1], found[1:5], found[5:]
    return [torch.cat(part, dim=1).numpy() for part in (whole, pieces, batch_size)]


def _of_one(paths: dict[str, Path]) -> dict[str, list[NDArray[Any]]]:
    models = {kind: load_shard(path, dtype="float32", device="cpu") for kind, path in paths.items()}
    llama = models["llama"]
    with pytest.raises(ValueError, match="hidden"):  # C would read beyond it
        llama.run_layers(torch.zeros(2, llama.hidden_size - 4), 0, 1, KVCache(llama, 4))
    return {kind: states(model, TOKENS[:20]) for kind, model in models.items() if model.kernels is not None}


@needs_native
def test_halves_are_the_layers_of_every_family_bit_for_bit(tmp_path: Path) -> None:
    paths = {}
    for kind in FAMILIES:
        paths[kind] = tmp_path / kind
        reference(kind, 2).float().save_pretrained(paths[kind])
    (found,) = results_of(1, _of_one, paths)
    assert {*paths} - {*found} == {"olmo2"}  # its norms are over the heads of all ranks
    for kind, path in paths.items():
        if kind not in found:
            continue
        expected = states(load_model(path, dtype="float32", device="cpu"), TOKENS[:20])
        for one, other in zip(found[kind], expected):
            assert np.array_equal(one, other), kind


def _of_many(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"cores": []}
    for dtype in ("float32", "bfloat16", "int8"):
        model = load_shard(path, dtype=dtype, device="cpu")
        found["cores"] = sorted(os.sched_getaffinity(0))
        assert model.kernels is not None
        for small in (1 << 16, 256):  # bytes: with the second, rows are summed by all ranks together
            tensor_parallel.SMALL = ranks.SMALL = small
            found[f"{dtype} {small}"] = states(model)
    generator = SelfSpecGenerator(model, prefix_cache=0)
    options: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": []}
    alone = [generator.generate(prompt, policy="ls:2-3", **options).new_tokens for prompt in PROMPTS]
    together = generator.generate_batch([*PROMPTS], batch_size=3, policy="del", **options)
    found["texts"] = alone, [result.new_tokens for result in together]
    return found


@needs_native
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_row_depends_on_no_other(number: int, tmp_path: Path) -> None:
    """Every bit, on every rank, whichever way parts are summed. With 4 ranks two share a key-value head."""
    llama = tiny_llama(num_layers=4, heads=4, kv_heads=2, intermediate_size=26, late_scale=0.4, seed=11)
    llama.save_pretrained(tmp_path)
    found = results_of(number, _of_many, tmp_path)
    for dtype in ("float32", "bfloat16", "int8"):
        first = found[0][f"{dtype} 65536"][0]
        for told in found:
            for small in (1 << 16, 256):
                for one in told[f"{dtype} {small}"]:
                    assert np.array_equal(one, first), (dtype, small)
    for told in found:
        assert told["texts"][0] == told["texts"][1] == found[0]["texts"][0]
    whole = states(load_model(tmp_path, dtype="float32", device="cpu"))[0]
    np.testing.assert_allclose(found[0]["float32 65536"][0], whole, rtol=1e-4, atol=1e-5)
    taken = [core for told in found for core in told["cores"]]
    if len(os.sched_getaffinity(0)) >= number:
        assert len(taken) == len({*taken})


def test_cores_are_divided_where_there_are_enough() -> None:
    cores = [[0], [1], [2], [3], [8]]
    assert [share_of(cores, place, 2) for place in range(2)] == [[0, 1], [2, 3]]
    assert share_of([[3]], 1, 2) == [3]
    assert share_of([[0], [5]], 0, 1) == [0, 5]


def test_a_core_s_threads_are_not_divided_nor_a_socket_s_cores_mixed() -> None:
    cores = [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert [share_of(cores, place, 2) for place in range(2)] == [[0, 4, 2, 6], [1, 5, 3, 7]]
    assert [share_of(cores, place, 3) for place in range(3)] == [[0, 4], [2, 6], [1, 5]]
    assert [share_of(cores, place, 8) for place in range(8)] == [[0], [4], [2], [6], [1], [5], [3], [7]]
