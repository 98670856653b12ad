"""Training runs of seconds: their options, and text that models of their size can learn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models.training.training_config import TrainingConfig
from selfspec.exits.settings import ExitTraining
from selfspec.pacer.settings import PreVerifierTraining
from tiny_llama import tiny_llama, tiny_tokenizer

TINY: dict[str, Any] = {
    "vocab_size": 280, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "intermediate_size": 24, "context_length": 96, "batch_tokens": 64, "micro_batch_tokens": 32, "sequence_length": 16,
    "long_sequence_length": 32, "long_steps": 2, "warmup_steps": 2, "eval_every": 4, "eval_tokens": 64, "log_every": 1,
    "save_every": 3, "holdout_fraction": 0.2, "exit_loss": "full", "layer_dropout": 0.5, "dropout_time": "continual",
    "export_dtype": "float32",
}  # fmt: skip


def tiny(text: str | Path, output_dir: str | Path, **changes: Any) -> TrainingConfig:
    return TrainingConfig(**{**TINY, "max_steps": 8, "data": (str(text),), "output_dir": str(output_dir), **changes})


def tiny_exits(checkpoint: Path, output: Path, **changes: Any) -> ExitTraining:
    options: dict[str, Any] = {
        "data": (str(checkpoint / "text.txt"),), "output_dir": str(output), "model": str(checkpoint),
        "exit_layers": (1, 2), "rank": 4, "holdout_fraction": 0.3, "sequence_length": 32, "batch_tokens": 64,
        "max_tokens": 500, "held_out_tokens": 100, "epochs": 1.0, "save_every": 3, "log_every": 1, "warmup_steps": 2,
    }  # fmt: skip
    return ExitTraining(**{**options, **changes})


def tiny_pacer(checkpoint: Path, output: Path, **changes: Any) -> PreVerifierTraining:
    options: dict[str, Any] = {
        "data": (str(checkpoint / "text.txt"),), "output_dir": str(output), "model": str(checkpoint), "dtype": "float64",
        "exit_layers": (1, 2), "num_prompts": 6, "num_held_out": 3, "prompt_tokens": 12, "response_tokens": 20,
        "window": 6, "positions": 6, "holdout_fraction": 0.3, "epochs": 2.0, "batch_responses": 2, "save_every": 3,
        "log_every": 1, "warmup_steps": 2,
    }  # fmt: skip
    return PreVerifierTraining(**{**options, **changes})


def write_checkpoint(folder: Path, **options: Any) -> Path:
    """A tiny model, its tokenizer and text that it can read; the folder. options: of `tiny_llama`."""
    tiny_llama(**{"num_layers": 4, "seed": 5, "late_scale": 0.7, **options}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(f"a bed {'ab' * n} head, a fig. " * 3 for n in range(30)))
    return folder


def write_numbers(path: Path) -> str:
    """Documents like "one and two make 3"; the path."""
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
    lines = [f"{names[left]} and {names[right]} make {left + right}\n" * 3 for left in range(12) for right in range(12)]
    path.write_text("<|endoftext|>\n".join(lines))
    return str(path)


def weights(folder: Path) -> dict[str, Tensor]:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def begin_launched() -> None:
    """Forget what accelerate knows of this process, as a training in a forked process, or of another precision, must."""
    os.environ["OMP_NUM_THREADS"] = "1"  # which accelerate would choose, with a warning
    AcceleratorState._reset_state(reset_partial_state=True)
