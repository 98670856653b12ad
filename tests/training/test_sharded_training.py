"""Training of a model that is divided over processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from layerskip_models.training.loop import train
from layerskip_models.training.microbatches import micro_batches, rows_of
from layerskip_models.training.resumable_run import claim_output_dir
from layerskip_models.training.saving import latest_checkpoint
from layerskip_models.training.sharding import ShardedTraining
from layerskip_models.training.training_config import TrainingConfig
from rank_processes import RankFailed, on_ranks, results_of
from tiny_llama import tiny_llama
from tiny_training import TINY, begin_as_rank, bytes_held, tiny, weights, write_numbers


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("text") / "numbers.txt")


def _train(config: TrainingConfig, lost_in_step: int | None = None) -> dict[str, int]:
    """Train in this process of several; bytes that it held at the end of the last step. The last rank may be lost."""
    begin_as_rank()
    held: dict[str, int] = {}
    steps = 0
    clip, save = ShardedTraining.clip, ShardedTraining.save

    def counted(self: Any, max_norm: float) -> None:
        nonlocal steps
        steps += 1
        if steps == lost_in_step and self.rank == self.ranks - 1:
            os._exit(1)
        clip(self, max_norm)
        held["parameters"] = bytes_held(self.model.parameters())
        held["gradients"] = bytes_held(parameter.grad for parameter in self.model.parameters())

    def saved(self: Any, path: Path, optimizers: Any, write_state: Any) -> None:
        save(self, path, optimizers, write_state)
        states = [value for one in optimizers for state in one.state.values() for value in state.values()]
        held["states"] = bytes_held(value for value in states if value.dim())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedTraining, "clip", counted)
        patch.setattr(ShardedTraining, "save", saved)
        train(config)
    return held


def _losses(folder: Path) -> list[list[float]]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [[*record["loss"].values(), *record.get("held_out", {"loss": []})["loss"]] for record in records]


def _assert_alike(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """Losses, as logged with four digits, and weights, which are of the order of 0.01 to 1."""
    assert len(_losses(one)) == len(_losses(other))
    for left, right in zip(_losses(one), _losses(other)):
        assert left == pytest.approx(right, abs=2e-4 + tolerance)
    expected, found = weights(one / "model"), weights(other / "model")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


def test_two_processes_learn_what_one_does_and_each_holds_half(text: str, tmp_path: Path) -> None:
    """Muon and AdamW, layer dropout of different layers in both, several exits, weighted losses and own text."""
    train(tiny(text, tmp_path / "one", max_steps=5))
    for held in results_of(2, _train, tiny(text, tmp_path / "two", max_steps=5, shard=True)):
        whole = sum(
            value.numel() for name, value in weights(tmp_path / "one" / "model").items() if "lm_head" not in name
        )
        # Every number of rows here is even. A padding to the same size in all processes would add a little.
        assert held["parameters"] == held["gradients"] == 4 * whole / 2
        matrices = 4 * (
            16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24
        )  # in 4 layers, with one number of momentum, the others two
        assert held["states"] == 4 * (2 * whole - matrices) / 2
    _assert_alike(tmp_path / "one", tmp_path / "two")
    assert not [*(tmp_path / "two" / "checkpoints").glob("*/*.pt")]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_lost_process_and_another_number_of_them_change_nothing(text: str, tmp_path: Path, optimizer: str) -> None:
    """Three processes divide neither the rows of a batch nor those of the matrices."""
    train(tiny(text, tmp_path / "one", optimizer=optimizer))
    config = tiny(text, tmp_path / "more", optimizer=optimizer, shard=True)
    first, second = on_ranks(2, _train, config, 5)
    assert isinstance(first, RankFailed)  # its messages had nobody to go to
    assert second is None
    latest = latest_checkpoint(tmp_path / "more" / "checkpoints")
    assert latest is not None
    assert latest[1] == 3
    assert on_ranks(3, _train, config, 5)[2] is None  # in step 8
    latest = latest_checkpoint(tmp_path / "more" / "checkpoints")
    assert latest is not None
    assert latest[1] == 6
    results_of(1, _train, config)
    _assert_alike(tmp_path / "one", tmp_path / "more")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_an_untied_checkpoint_is_read_in_parts(text: str, tmp_path: Path, precision: str, tolerance: float) -> None:
    """And in bfloat16, where norms are gathered rounded and all else is as under autocast."""
    results_of(1, _train, tiny(text, tmp_path / "tokenizer", max_steps=1, long_steps=0, own_text_steps=0))
    start = tmp_path / "start"
    llama = tiny_llama(vocab_size=280, max_position_embeddings=96, tie_word_embeddings=False, late_scale=1.0)
    llama.to(torch.bfloat16).save_pretrained(start)
    AutoTokenizer.from_pretrained(tmp_path / "tokenizer" / "tokenizer").save_pretrained(start)
    changes = {"init": str(start), "precision": precision, "optimizer": "adamw", "learning_rate": 1e-3}
    results_of(1, _train, tiny(text, tmp_path / "one", **changes))
    results_of(2, _train, tiny(text, tmp_path / "two", shard=True, **changes))
    # Before the first step the norms are those of a checkpoint in bfloat16, which gathering does not round.
    assert _losses(tmp_path / "one")[0] == pytest.approx(_losses(tmp_path / "two")[0], abs=2e-4)
    _assert_alike(tmp_path / "one", tmp_path / "two", tolerance)


@pytest.mark.slow
def test_under_a_launcher_and_alone(text: str, tmp_path: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, "max_steps": 2}.items()]
    options += ["--data", text, "--output-dir", str(tmp_path / "out"), "--shard"]
    settings: dict[str, Any] = {
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        "check": False,
        "capture_output": True,
        "text": True,
    }
    command = ["-m", "layerskip_models.training.loop", *options]
    alone = subprocess.run([sys.executable, *command], **settings)
    assert alone.returncode == 2
    assert alone.stderr.count("\n") == 1
    assert "put `torchrun --nproc_per_node N` or `accelerate launch` in front" in alone.stderr
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *command], **settings
    )
    assert launched.returncode == 0, launched.stderr
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_what_does_not_go_together_is_said(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard gathers the layers as they run, which compile would break up"):
        tiny(text, tmp_path / "out", shard=True, compile=True)
    with pytest.raises(ValueError, match="shard divides the model over processes, and this is one alone"):
        train(tiny(text, tmp_path / "out", shard=True))
    whole = tiny(text, tmp_path / "whole")
    claim_output_dir(whole)
    (tmp_path / "whole" / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="holds a run with another shard"):
        claim_output_dir(replace(whole, shard=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("num_rows", [1, 4, 7])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_passes_in_step_cover_the_batch_once(num_rows: int, at_once: int, ranks: int) -> None:
    each = [micro_batches(num_rows, at_once, rank, ranks, in_step=True) for rank in range(ranks)]
    assert len({len(parts) for parts in each}) == 1
    for parts in zip(*each):
        assert len({len(part.rows) for part in parts}) == 1
        real = sorted(row for part in parts for row in part.rows[: part.real])
        assert all(real == sorted(part.together) for part in parts)
    apart = [micro_batches(num_rows, at_once, rank, ranks, in_step=False) for rank in range(ranks)]
    for split in (each, apart):
        counted = [row for parts in split for part in parts for row in part.rows[: part.real]]
        assert sorted(counted) == list(range(num_rows))


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for num_rows in range(1, 12):
        for ranks in range(1, 6):
            cut = [part.tolist() for part in torch.arange(num_rows).chunk(ranks)]
            found = [list(rows_of(num_rows, rank, ranks)) for rank in range(ranks)]
            assert found == cut + [[]] * (ranks - len(cut))


def _checkpointed(folder: Path, write: bool) -> list[Any]:
    """Write or read the parameters of a model and their optimisers' state, of tensors of 7 and of 1 rows, divided."""
    begin_as_rank()
    config = tiny_llama(vocab_size=7, num_layers=1).config
    held = ShardedTraining(Accelerator(cpu=True), config, "fp32")
    held.fill(lambda name, shape, rows: torch.arange(float(shape.numel())).view(shape)[rows.start : rows.stop] * write)
    optimizer = torch.optim.AdamW(held.model.parameters(), lr=0.1)
    if write:
        for parameter in held.model.parameters():
            parameter.grad = parameter.detach() + 1
        optimizer.step()
        held.save(folder, [optimizer], lambda path: None)
    else:
        held.load(folder, [optimizer])
    states = [value for state in optimizer.state.values() for value in state.values()]
    found = [*held.model.parameters(), *states]
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach().tolist() for one in found]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder that two processes wrote, and what is in it. Tests must not change it."""
    folder = tmp_path_factory.mktemp("shards") / "step"
    written, *_ = results_of(2, _checkpointed, folder, True)
    return folder, written


@pytest.mark.parametrize("ranks", [1, 3])
def test_shards_of_some_processes_are_read_by_others(of_two: tuple[Path, list[Any]], ranks: int) -> None:
    """Of two processes by one and by three, which do not divide 7 rows."""
    folder, written = of_two
    for read in results_of(ranks, _checkpointed, folder, False):
        assert sorted(map(str, read)) == sorted(map(str, written))


def test_a_missing_shard_is_said(of_two: tuple[Path, list[Any]], tmp_path: Path) -> None:
    shutil.copytree(of_two[0], tmp_path / "step")
    next((tmp_path / "step").glob("__1*")).unlink()
    (failed,) = {str(one).split("\n")[0] for one in on_ranks(1, _checkpointed, tmp_path / "step", False)}
    assert "does not hold the shards of all processes" in failed
