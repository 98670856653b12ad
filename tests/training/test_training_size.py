"""What `selfspec inspect --shape --train` computes is what a divided training allocates and sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from layerskip_models.training import loop
from layerskip_models.training.documents import train_tokenizer
from layerskip_models.training.recipe import exit_hidden_states, run_layer
from layerskip_models.training.resumable_run import ResumableRun
from layerskip_models.training.sharding import ShardedTraining
from layerskip_models.training.training_config import TrainingConfig
from layerskip_models.training.training_size import layer_activations, training_size
from rank_processes import results_of
from selfspec.cli.main import app
from tiny_llama import tiny_llama
from tiny_training import begin_as_rank, bytes_held, tiny, write_numbers


def _measured(config: TrainingConfig) -> dict[str, int]:
    """Of one step of one micro batch: bytes held behind it, gathered when a layer runs, and exchanged."""
    begin_as_rank()
    found = dict.fromkeys(("weights", "gradients", "optimizer_state", "whole", "gather", "reduce", "exchange"), 0)
    take_step, clip = ResumableRun.take_step, ShardedTraining.clip
    messages: dict[str, tuple[Any, str, str | int]] = {
        "gather": (_fsdp_collectives.DefaultAllGather, "__call__", "output_tensor"),
        "reduce": (_fsdp_collectives.DefaultReduceScatter, "__call__", "input_tensor"),
        "exchange": (dist, "all_to_all_single", 1),
    }
    models: list[Any] = []

    def during_step(self: Any, *arguments: Any) -> Any:
        models.append(self.held.model)
        with pytest.MonkeyPatch.context() as patch:
            for kind, (place, name, argument) in messages.items():
                patch.setattr(place, name, _counting(found, kind, argument, getattr(place, name)))
            report = take_step(self, *arguments)
        found["weights"] = bytes_held(self.held.model.parameters())
        states = [value for one in self.optimizers for state in one.state.values() for value in state.values()]
        found["optimizer_state"] = bytes_held(value for value in states if value.dim())
        return report

    def clipped(self: Any, max_norm: float) -> None:
        found["gradients"] = bytes_held(parameter.grad for parameter in self.model.parameters())
        clip(self, max_norm)

    def layer_run(layer: Any, *arguments: Any) -> Tensor:
        def whole(*ignored: Any) -> None:
            there = (one for one in models[0].parameters() if not isinstance(one, DTensor))
            found["whole"] = max(found["whole"], sum(one.untyped_storage().nbytes() for one in there))

        if models:
            handle = layer.mlp.register_forward_hook(whole)
            output = run_layer(layer, *arguments)
            handle.remove()
            return output
        return run_layer(layer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableRun, "take_step", during_step)
        patch.setattr(ShardedTraining, "clip", clipped)
        patch.setattr(loop.LayerSkipTraining.__init__, "__defaults__", (layer_run,))
        loop.train(config)
    return found


def _counting(found: dict[str, int], kind: str, argument: str | int, send: Callable[..., Any]) -> Callable[..., Any]:
    """A function that sends a message, and adds the bytes of one of its arguments."""

    def counted(*arguments: Any, **options: Any) -> Any:
        tensor: Tensor = arguments[argument] if isinstance(argument, int) else options[argument]
        found[kind] += tensor.nbytes
        return send(*arguments, **options)

    return counted


@pytest.mark.parametrize(
    ("tied", "optimizer", "precision"),
    [
        (False, "muon", "bf16"),
        pytest.param(True, "adamw", "bf16", marks=pytest.mark.slow),
        pytest.param(False, "adamw", "fp32", marks=pytest.mark.slow),
    ],
)
def test_it_is_what_is_allocated_and_sent(tmp_path: Path, tied: bool, optimizer: str, precision: str) -> None:
    text = write_numbers(tmp_path / "numbers.txt")
    llama = tiny_llama(vocab_size=280, max_position_embeddings=96, tie_word_embeddings=tied)
    llama.save_pretrained(tmp_path / "start")
    train_tokenizer(Path(text).read_text().split("<|endoftext|>\n"), 280).save_pretrained(tmp_path / "start")
    config = tiny(
        text, tmp_path / "out", init=str(tmp_path / "start"), shard=True, max_steps=1, long_steps=0, own_text_steps=0,
        layer_dropout=0.0, batch_tokens=64, micro_batch_tokens=32, optimizer=optimizer, precision=precision,
    )  # fmt: skip
    size = training_size(
        llama.config, 2, optimizer=optimizer, precision=precision, micro_batch_tokens=32, sequence_length=16
    )
    for found in results_of(2, _measured, config):
        assert found["weights"] == size.weights
        assert found["gradients"] == size.gradients
        assert found["optimizer_state"] == size.optimizer_state
        inside = 2 if precision == "bf16" else 4
        assert found["whole"] == size.head + size.layers * inside // (3 * inside + 4)  # forwards, one layer at a time
        assert found["gather"] == size.gathered_per_pass
        assert found["reduce"] == size.reduced_per_pass
        assert found["exchange"] == size.exchanged_per_step // 2  # each of two processes has half of the numbers


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_activations_are_what_a_forward_pass_keeps(kv_heads: int) -> None:
    """All layers of a model, in memory, against one that is traced without."""
    llama = tiny_llama(num_layers=3, heads=2, kv_heads=kv_heads)
    llama.config._attn_implementation = "sdpa"
    weights = {parameter.untyped_storage()._cdata for parameter in llama.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights and tensor.dtype == torch.float32:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        exit_hidden_states(llama, torch.zeros(2, 16, dtype=torch.int64), [0, 2])
    rotary = 2 * 16 * 8 * 4  # cosines and sines, which all layers share
    each = layer_activations(llama.config, 2, 16, "fp32")
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == 3 * each - 2 * rotary


def test_the_command_counts_by_arithmetic() -> None:
    """Llama-3-8B over 8: 8,030,261,248 numbers, of which Muon has one more of 6,979,321,856 and AdamW two of the others."""
    result = CliRunner().invoke(app, ["inspect", "--shape", "llama3-8B", "--train", "8", "--optimizer", "muon"])
    assert result.exit_code == 0, result.output
    assert f"weights     {4 * 8_030_261_248 / 8 / 2**30:8.2f} GiB" in result.output
    assert f"optimiser   {4 * (2 * 8_030_261_248 - 6_979_321_856) / 8 / 2**30:8.2f} GiB" in result.output
    head = 4 * (128256 * 4096 + 4096) / 2**30
    assert f"the head {head:.2f} and its gradients {head:.2f}" in result.output
    assert f"for each step {2 * 4 * 6_979_321_856 * 7 / 8 / 2**30:.2f}" in result.output


def test_what_is_not_trained_is_refused() -> None:
    config = tiny_llama().config
    config.model_type = "qwen2"
    with pytest.raises(ValueError, match="only Llama checkpoints are trained"):
        training_size(config, 2)
