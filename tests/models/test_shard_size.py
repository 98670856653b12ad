"""What `selfspec inspect --shape` computes is what a divided model allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.parallel.shard_loading import load_shard
from layerskip_models.parallel.shard_size import shard_size
from rank_processes import results_of
from selfspec.cli.main import app
from tiny_llama import tiny_llama

DEVICE = torch.device("cpu")


def _allocated(path: Path, dtype: str) -> tuple[int, int]:
    """Bytes of the weights' memory on this rank, and of the cache of 10 positions; the demo's head is below 16 MB."""
    model: Any = load_shard(path, dtype=dtype, device="cpu")
    found: dict[int, int] = {}

    def count(*tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    def count_linear(linear: Any) -> None:
        part = getattr(linear, "_part", linear)
        count(*(part.tensors if hasattr(part, "tensors") else (part.weight, part.bias)))

    for layer in model._layers:
        for linear in layer.linears:
            count_linear(linear)
        count(layer.input_norm._weight, layer.post_attention_norm._weight)
    count_linear(model._head)
    count(model._embedding, model._final_norm._weight)
    return sum(found.values()), KVCache(model, 10).num_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_it_is_what_is_allocated(dtype: str, tied: bool, tmp_path: Path) -> None:
    if dtype == "bfloat16" and not native_works(DEVICE, torch.float32):
        pytest.skip("no native kernels here")
    llama = tiny_llama(heads=4, kv_heads=2, intermediate_size=26, vocab_size=27, tie_word_embeddings=tied)
    stored = getattr(torch, dtype)
    llama.to(stored).save_pretrained(tmp_path)
    for rank, (weights, cache) in enumerate(results_of(2, _allocated, tmp_path, dtype)):
        size = shard_size(llama.config, rank, 2, stored, DEVICE)
        assert size.weights == weights
        assert 10 * size.kv_per_token == cache


def test_the_command_counts_by_arithmetic() -> None:
    """Llama-2-70B over 4: 80 layers of 64 * 128 * 8192 * 2 + 2 * 8 * 128 * 8192 + 3 * 28672 * 8192 numbers, 2 bytes each."""
    result = CliRunner().invoke(app, ["inspect", "--shape", "llama2-70B", "--tensor-parallel", "4"])
    assert result.exit_code == 0, result.output
    layers = 80 * (64 * 128 * 8192 * 2 + 2 * 8 * 128 * 8192 + 3 * 28672 * 8192) * 2 / 4 / 2**30
    assert f"layers {layers:.2f}" in result.output
    assert "for 4096 tokens (80 KiB each)" in result.output  # 80 layers, key and value, 2 heads of 128, 2 bytes
    sent = (161 * 2 * 3 / 4 * 8192 * 2 + 48) / 2**20
    assert f"{sent:.2f} MiB for each row of a pass, in 161 sums" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama9"], "unknown shape 'llama9': there are small"),
        (["--shape", "llama2-70B", "--tensor-parallel", "3"], "take 1, 2, 4, 8, 16"),
        (["--tensor-parallel", "2"], "go with --shape"),
        (["--train", "2"], "go with --shape"),
        (["--shape", "small", "--train", "2", "--tensor-parallel", "2"], "leave out --tensor-parallel"),
        (["--shape", "small", "--train", "2", "--dtype", "float16"], "--dtype must be one of auto, bfloat16, float32"),
        (["--shape", "small", "--train", "2", "--optimizer", "sgd"], "--optimizer must be one of muon, adamw"),
        (["--shape", "small", "--train", "2", "--context", "2048"], "holds no sequence of 2048"),
        (["somewhere", "--shape", "small"], "not both"),
        (["--shape", "small", "--dtype", "int8"], "--dtype must be one of auto"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert result.exit_code == 2
    assert message in result.output
