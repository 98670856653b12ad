"""TrainingConfig: every option of a training run, with its meaning and its check."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor

from layerskip_models.training.accepted_length import ARMS, accepted_length_weights
from layerskip_models.training.documents import DEFAULT_EXCLUDES, DataSource, parse_data_source
from layerskip_models.training.recipe import CURRICULA, DROPOUT_TIMES, EXIT_WEIGHTS, exit_loss_weights

OPTIMIZERS = ("muon", "adamw")
LR_SCHEDULES = ("cosine", "wsd")
PRECISIONS = ("fp32", "bf16")
OWN_TEXT_PROMPT = 64  # tokens of training text before a continuation of the model's own


def option(default: Any, help: str) -> Any:
    """A field of a training configuration with its help text, which the command line shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """One training run. Values are checked on construction: ValueError says which field, its range, what to do."""

    data: tuple[str, ...] = field(metadata={"help": "PATH[:weight] of a .txt, .txt.gz or .py file or a folder."})
    output_dir: str = field(metadata={"help": "Folder for log, checkpoints and the finished model."})
    init: str | None = option(None, "Llama checkpoint to continue, hub name or path (default: train from scratch).")
    tokenizer: str | None = option(None, "Tokenizer folder (default: init's, or one trained on the data).")
    exclude: tuple[str, ...] = option(DEFAULT_EXCLUDES, "Names of folders and files to leave out of folders.")
    holdout_fraction: float = option(0.01, "Share of the documents kept out of training, for evaluation.")

    vocab_size: int = option(4096, "Size of a tokenizer trained here (from scratch only, like the shape below).")
    hidden_size: int = option(192, "Width of the hidden states.")
    num_layers: int = option(12, "Number of layers L.")
    num_heads: int = option(3, "Attention heads.")
    num_kv_heads: int = option(1, "Key-value heads; divides num_heads.")
    head_dim: int = option(64, "Width of a head.")
    intermediate_size: int = option(576, "Width inside the MLP.")
    context_length: int = option(2048, "max_position_embeddings of the model.")
    rope_theta: float = option(10000.0, "Base of the rotary embedding.")

    max_steps: int = option(1000, "Optimiser steps T.")
    batch_tokens: int = option(8192, "Tokens per optimiser step, over all processes.")
    micro_batch_tokens: int = option(1024, "Tokens per forward pass of one process.")
    sequence_length: int = option(256, "Tokens per sequence.")
    long_sequence_length: int = option(2048, "Tokens per sequence in the last long_steps steps.")
    long_steps: int = option(0, "Steps at the end with long sequences, so that long contexts work.")
    loss_chunk_rows: int = option(1024, "Rows whose logits exist at once.")
    optimizer: str = option("muon", "muon (layers' matrices; AdamW for the rest) or adamw.")
    learning_rate: float = option(3e-3, "Peak learning rate.")
    lr_schedule: str = option("wsd", "cosine, or wsd: constant, then down to zero over the last decay_fraction.")
    decay_fraction: float = option(0.4, "Share of the steps in which wsd goes down.")
    warmup_steps: int = option(30, "Steps in which the learning rate rises.")
    weight_decay: float = option(0.1, "Decoupled weight decay of matrices (not embeddings, not norms).")
    max_grad_norm: float = option(1.0, "Maximum norm of the gradient.")
    precision: str = option("fp32", "fp32, or bf16 for autocast.")

    compile: bool = option(
        False, "Compile the layers with torch.compile: faster steps, slightly different rounding; needs a C++ compiler."
    )

    shard: bool = option(
        False,
        "Divide weights, gradients and optimiser state over the processes (FSDP2), for models that one device does not "
        "hold; with torchrun or accelerate launch in front.",
    )

    layer_dropout: float = option(0.0, "p_max: the last layer's dropout probability at its highest.")
    dropout_time: str = option("scratch", "S(t): scratch (rises from 0) or continual (constant 1).")
    exit_weights: str = option("uniform", "uniform, published, or L numbers separated by commas.")
    e_scale: float = option(0.2, "Scale of the lower exits in the published weights.")
    last_exit_weight: float = option(3.0, "The last layer's weight when uniform (each other exit has 1).")
    exit_loss: str = option(
        "uniform", "Weights of the tokens in the exits' losses: uniform, or cumulative or full, by accepted length."
    )
    exit_loss_alpha: float = option(0.5, "Smoothing of the weights by accepted length: 0 none, 1 equal weights.")
    exit_loss_block: int = option(8, "Tokens of the draft whose accepted length counts in these weights.")
    curriculum: str = option("rotational", "rotational, gradual, all, or none (plain training).")
    rotation: int = option(4, "R of the rotational curriculum: every R-th layer, rotating.")
    own_text_steps: int = option(0, "Last steps that also train on the model's own greedy text, against its loops.")
    own_text_rows: int = option(16, "Prompts continued in each of these steps, over all processes.")
    own_text_tokens: int = option(100, "Greedy tokens after each of these prompts, which are 64 tokens long.")
    own_text_weight: float = option(0.5, "Weight of that loss beside the loss on the data, which has 1.")

    eval_every: int = option(100, "Steps between evaluations on held-out text.")
    eval_tokens: int = option(8192, "Held-out tokens per evaluation.")
    log_every: int = option(10, "Steps between lines in the log.")
    save_every: int = option(100, "Steps between checkpoints, the most that an interruption loses.")
    export_dtype: str = option("bfloat16", "Type of the finished model: bfloat16, float16 or float32.")
    seed: int = option(0, "Random seed.")

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data must name at least one file or folder (--data PATH[:weight])")
        self.sources()
        for name in _POSITIVE_INTEGERS:
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("long_steps", "own_text_steps", "warmup_steps", "seed"):
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("learning_rate", "last_exit_weight", "max_grad_norm", "rope_theta"):
            require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        for name in ("weight_decay", "e_scale", "own_text_weight"):
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("layer_dropout", "holdout_fraction"):
            require(0 <= getattr(self, name) < 1, name, "in [0, 1)", getattr(self, name))
        require(0 <= self.exit_loss_alpha <= 1, "exit_loss_alpha", "in [0, 1]", self.exit_loss_alpha)
        require(0 < self.decay_fraction <= 1, "decay_fraction", "in (0, 1]", self.decay_fraction)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        require(
            self.long_steps <= self.max_steps,
            "long_steps",
            f"at most max_steps ({self.max_steps})",
            self.long_steps,
        )
        if self.exit_loss != "uniform" and self.curriculum == "none":
            raise ValueError(
                f"exit_loss {self.exit_loss} weights the losses of exits, and curriculum none trains no exit:"
                " choose another curriculum, or exit_loss uniform"
            )
        if self.shard and self.compile:
            raise ValueError(
                "shard gathers the layers as they run, which compile would break up: choose one of the two"
            )
        require(self.num_layers >= 2, "num_layers", "at least 2", self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}")
        require(self.head_dim % 2 == 0, "head_dim", "even", self.head_dim)
        for length in {self.sequence_length_at(0), self.sequence_length_at(self.max_steps - 1)}:
            if self.batch_tokens % length:
                raise ValueError(
                    f"batch_tokens must be a multiple of the sequence length {length}, got {self.batch_tokens}"
                )
        if self.init is None and self.longest_sequence() > self.context_length:
            raise ValueError(
                f"sequences of {self.longest_sequence()} tokens are longer than context_length {self.context_length}:"
                " shorten the sequences or raise context_length"
            )
        if self.init is None:
            self.weights(self.num_layers)

    def sources(self) -> list[DataSource]:
        return [parse_data_source(text) for text in self.data]

    def weights(self, num_layers: int) -> list[float]:
        """Exit-loss weights e(l) before normalisation, length num_layers."""
        kind: str | list[float] = self.exit_weights
        if self.exit_weights not in EXIT_WEIGHTS:
            with contextlib.suppress(ValueError):  # exit_loss_weights names the choices
                kind = [float(number) for number in self.exit_weights.split(",")]
        return exit_loss_weights(num_layers, kind, e_scale=self.e_scale, last_exit_weight=self.last_exit_weight)

    def row_weights(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Weights of an exit's rows from their losses, for `early_exit_backward`; None when they are uniform."""
        if self.exit_loss == "uniform":
            return None
        return partial(
            accepted_length_weights, arm=self.exit_loss, alpha=self.exit_loss_alpha, block=self.exit_loss_block
        )

    def sequence_length_at(self, step: int) -> int:
        return self.long_sequence_length if step >= self.max_steps - self.long_steps else self.sequence_length

    def longest_sequence(self) -> int:
        own_text = OWN_TEXT_PROMPT + self.own_text_tokens if self.own_text_steps else 0
        return max(self.sequence_length_at(0), self.sequence_length_at(self.max_steps - 1), own_text)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step: a linear rise, then a half cosine to a tenth, or constant and linear to zero."""
        rise = min(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.lr_schedule == "wsd":
            fall = min(1.0, (self.max_steps - step) / max(self.decay_fraction * self.max_steps, 1))
        else:
            fall = 0.55 + 0.45 * math.cos(math.pi * step / self.max_steps)
        return self.learning_rate * rise * fall


_POSITIVE_INTEGERS = (
    "vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "context_length",
    "max_steps", "batch_tokens", "micro_batch_tokens", "sequence_length", "long_sequence_length", "loss_chunk_rows",
    "exit_loss_block", "rotation", "own_text_rows", "own_text_tokens", "eval_every", "eval_tokens", "log_every", "save_every",
)  # fmt: skip
_CHOICES = {
    "optimizer": OPTIMIZERS,
    "lr_schedule": LR_SCHEDULES,
    "precision": PRECISIONS,
    "dropout_time": DROPOUT_TIMES,
    "exit_loss": ARMS,
    "curriculum": CURRICULA,
    "export_dtype": ("bfloat16", "float16", "float32"),
}
# What may differ when a run is taken up again: nothing that changes the weights it arrives at.
OPERATIONAL_FIELDS = ("output_dir", "eval_every", "eval_tokens", "log_every", "save_every", "export_dtype")


def require(holds: bool, name: str, wanted: str, value: object) -> None:
    """Raise ValueError that says what the option must be and is, unless it holds."""
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value}")


def config_fields() -> tuple[Field[Any], ...]:
    """The fields of TrainingConfig, each with its help text in metadata["help"]."""
    return fields(TrainingConfig)
