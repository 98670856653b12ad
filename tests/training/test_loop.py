"""The loop that the three trainings share: interrupted, in two processes, in a folder that is not its own, with losses that
are none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launched_processes import results_of
from layerskip_models.exits.folder import load_adapters
from layerskip_models.training import loop
from layerskip_models.training.layerskip import train
from layerskip_models.training.run_folder import latest_checkpoint, write_folder
from selfspec.exits.settings import ExitTraining
from selfspec.exits.training import train_exit
from selfspec.pacer.network import load_preverifier
from selfspec.pacer.settings import PreVerifierTraining
from selfspec.pacer.training import train_preverifier
from tiny_training import begin_launched, tiny, tiny_exits, tiny_pacer, weights, write_checkpoint, write_numbers

Kind = tuple[Callable[[Any], Path], Callable[[Path, Path], Any], Callable[[Path], dict[str, Tensor]]]
KINDS: dict[str, Kind] = {
    "train": (train, lambda data, output: tiny(data / "numbers.txt", output, keep_at=(8,)), weights),
    "train-exit": (train_exit, tiny_exits, lambda folder: load_adapters(folder).state_dict()),
    "train-pacer": (train_preverifier, tiny_pacer, lambda folder: load_preverifier(folder).state_dict()),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers to learn from, beside a checkpoint with a text."""
    folder = write_checkpoint(tmp_path_factory.mktemp("data"))
    write_numbers(folder / "numbers.txt")
    return folder


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_ends_as_the_uninterrupted_one(
    kind: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, made, read = KINDS[kind]
    whole = run(made(data, tmp_path / "whole"))
    gradient = loop._gradient
    calls = [0]

    def interrupted(*arguments: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return gradient(*arguments)

    config = made(data, tmp_path / "parts")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "_gradient", interrupted)
        run(config)
    saved = latest_checkpoint(tmp_path / "parts" / "checkpoints")
    assert saved is not None and saved[1] == 3 and not (tmp_path / "parts" / whole.name).exists()
    assert log_of(tmp_path / "parts")[-1]["step"] == 5
    with (tmp_path / "parts" / "log.jsonl").open("a") as stream:
        stream.write('{"st')  # a line that was not written to its end
    parts = run(config)
    assert same(read(whole), read(parts))
    one, other = log_of(tmp_path / "whole"), log_of(tmp_path / "parts")
    assert [line["step"] for line in other] == list(range(1, len(one) + 1))
    assert [{**line, "seconds": 0} for line in one] == [{**line, "seconds": 0} for line in other]
    # Called again it is finished; with other options it is refused; options that do not matter may differ.
    assert same(read(whole), read(run(replace(config, save_every=50))))
    with pytest.raises(ValueError, match="holds a run with another learning_rate, seed"):
        run(replace(config, learning_rate=1e-4, seed=1))
    saved = latest_checkpoint(tmp_path / "parts" / "checkpoints")
    assert saved is not None
    (saved[0] / "run.json").unlink()  # earlier versions had none
    with pytest.raises(ValueError, match="was written by an earlier version or with other options"):
        run(config)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_stays_near(kind: str, data: Path, tmp_path: Path) -> None:
    """States of the Pacer's data are in float16, which autocast to bfloat16 does not mix."""
    run, made, _ = KINDS[kind]
    for precision in ("bf16", "fp32"):
        begin_launched()  # a process has one precision
        run(replace(made(data, tmp_path / precision), precision=precision))
    one, other = ([*map(_numbers, log_of(tmp_path / precision)[:3])] for precision in ("fp32", "bf16"))
    assert other != one
    assert all(values == pytest.approx(expected, abs=0.05) for values, expected in zip(other, one))


def test_a_loss_that_is_none_ends_the_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the loss of step \d+ is nan: start again with a lower learning_rate"):
        train(tiny(data / "numbers.txt", tmp_path / "out", optimizer="adamw", learning_rate=1e30, max_steps=8))


def _launched(config: Any) -> Path:
    begin_launched()
    run = {ExitTraining: train_exit, PreVerifierTraining: train_preverifier}.get(type(config), train)
    return run(config)


@pytest.mark.parametrize(
    "changes", [{"optimizer": "muon"}, {"optimizer": "adamw"}, "train-exit", "train-pacer"], ids=str
)
def test_two_processes_learn_what_one_does_with_the_whole_batch(changes: Any, data: Path, tmp_path: Path) -> None:
    """Each computes half of a batch; of a LayerSkip training with other layers skipped and another length at the end."""
    kind = "train" if isinstance(changes, dict) else changes
    run, made, read = KINDS[kind]
    if kind == "train":
        options = {"max_steps": 2, "long_steps": 1, "keep_at": (), "eval_every": 1, **changes}
        one, two = (replace(made(data, tmp_path / name), **options) for name in ("one", "two"))
    else:
        one, two = (replace(made(data, tmp_path / name), epochs=0.5) for name in ("one", "two"))
    expected = read(run(one))
    found = read(results_of(2, _launched, two)[0])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5, msg=name)
    for line, other in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        assert _numbers(other) == pytest.approx(_numbers(line), abs=3e-4)


def _numbers(line: dict[str, Any]) -> Sequence[float]:
    """All figures of a line of the log, but for its time."""
    found = [value for name, value in line.items() if name != "seconds"]
    while any(isinstance(value, (dict, list)) for value in found):
        found = [
            one
            for value in found
            for one in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value])
        ]
    return found


def test_a_folder_that_holds_something_else(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no training run"):
        train(tiny(data / "numbers.txt", tmp_path))


def test_folders_are_written_whole(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        (path / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "step-00000003", fail)
    assert latest_checkpoint(tmp_path) is None
    for content in ("one", "two"):
        write_folder(tmp_path / "step-00000003", lambda path, text=content: (path / "f").write_text(text))
    assert (tmp_path / "step-00000003" / "f").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
