"""The checkpoints that are compared: which there are, how much text each was trained on, and how good its exits are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.record import Line
from layerskip_models.checkpoints.loading import load_tokenizer, load_transformers
from layerskip_models.training.evaluation import equal_shares, evaluate, held_out_by_path

STEPS = "steps"
"""Where a training leaves the models of `--keep-at`."""
HOLDOUT_FRACTION = 0.01
"""As in training, by default."""
_TRAINING = (
    "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size", "optimizer",
    "learning_rate", "lr_schedule", "decay_fraction", "warmup_steps", "weight_decay", "max_steps", "batch_tokens",
    "sequence_length", "precision", "curriculum", "rotation", "exit_weights", "last_exit_weight", "layer_dropout",
    "own_text_steps", "seed",
)  # fmt: skip
"""What a record says of a training: its options, but no paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A checkpoint. name: as tables write it. tokens: that it was trained on. training: its options; None if unknown."""

    name: str
    path: Path
    tokens: int | None = None
    training: dict[str, Any] | None = None


def find_rungs(paths: Sequence[Path]) -> list[Rung]:
    """The checkpoints of all paths, in this order. The folder of a training stands for the models that it kept, in theirs.

    Raises ValueError for a folder that is no checkpoint and has kept no models, and for two checkpoints of one name.
    """
    found = [_rung(checkpoint) for path in paths for checkpoint in _checkpoints(path)]
    names = [rung.name for rung in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"more than one checkpoint is called {', '.join(twice)}: give one of them, or rename its folder"
        )
    return found


def _checkpoints(path: Path) -> Iterator[Path]:
    kept = path / STEPS
    if kept.is_dir():
        yield from sorted((one for one in kept.iterdir() if one.name.isdigit()), key=lambda one: int(one.name))
    elif (path / "config.json").is_file() and not (path / "checkpoints").is_dir():
        yield path
    else:
        raise ValueError(
            f"{path} is neither a checkpoint nor a training that kept models: see selfspec train --keep-at"
        )


def _rung(path: Path) -> Rung:
    """A model that a training kept is known by the tokens it had seen; any other checkpoint by its folder."""
    run = path.absolute().parent.parent / "config.json"
    if path.absolute().parent.name != STEPS or not run.is_file():
        return Rung(name=path.absolute().name, path=path)
    options = json.loads(run.read_text(encoding="utf-8"))
    tokens = int(path.name) * int(options["batch_tokens"])
    return Rung(
        name=f"{tokens / 1e6:.2f} M",
        path=path,
        tokens=tokens,
        training={name: options[name] for name in _TRAINING},
    )


def held_out_figures(checkpoint: Path, texts: Sequence[Path], exclude: Sequence[str], max_tokens: int) -> Line:
    """loss: nats per token, and agreement with the last layer, of every layer on held-out text; None without any.

    Raises ValueError for a checkpoint that is no Llama.
    """
    network = load_transformers(str(checkpoint), dtype=torch.float32, device="cpu")
    if not isinstance(network, LlamaForCausalLM):
        raise ValueError(f"{checkpoint} must be a Llama checkpoint, it is of type {network.config.model_type!r}")
    tokenizer = load_tokenizer(str(checkpoint))
    documents = equal_shares(held_out_by_path(texts, exclude, HOLDOUT_FRACTION), tokenizer, max_tokens)
    curve = evaluate(network, tokenizer, documents, (), max_text_tokens=max_tokens).held_out_text
    if curve is None:
        return {"loss": None, "agreement": None}
    return {"loss": _rounded(curve.loss), "agreement": _rounded(curve.agreement)}


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
