"""A training run of seconds: its options, and text that a model of its size can learn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models.training.training_config import TrainingConfig

TINY: dict[str, Any] = {
    "vocab_size": 280,
    "hidden_size": 16,
    "num_layers": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "context_length": 96,
    "batch_tokens": 64,
    "micro_batch_tokens": 32,
    "sequence_length": 16,
    "long_sequence_length": 32,
    "long_steps": 2,
    "warmup_steps": 2,
    "eval_every": 4,
    "eval_tokens": 64,
    "log_every": 1,
    "save_every": 3,
    "holdout_fraction": 0.2,
    "exit_loss": "full",
    "exit_loss_block": 4,
    "own_text_steps": 3,
    "own_text_rows": 2,
    "own_text_tokens": 20,
    "layer_dropout": 0.5,
    "dropout_time": "continual",
    "export_dtype": "float32",
}


def tiny(text: str | Path, output_dir: str | Path, **changes: Any) -> TrainingConfig:
    return TrainingConfig(**{**TINY, "max_steps": 8, "data": (str(text),), "output_dir": str(output_dir), **changes})


def write_numbers(path: Path) -> str:
    """Documents like "one and two make 3"; the path."""
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
    lines = [f"{names[left]} and {names[right]} make {left + right}\n" * 3 for left in range(12) for right in range(12)]
    path.write_text("<|endoftext|>\n".join(lines))
    return str(path)


def weights(folder: Path) -> dict[str, Tensor]:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def begin_launched() -> None:
    """To be called first by a training in one of several forked processes: forget the state of the process they came from."""
    os.environ["OMP_NUM_THREADS"] = "1"  # which accelerate would choose, with a warning
    AcceleratorState._reset_state(reset_partial_state=True)
