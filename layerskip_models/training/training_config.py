"""TrainingConfig: every option of `selfspec train`, with its meaning and its check."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields
from typing import ClassVar

from layerskip_models.option_fields import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Range, option
from layerskip_models.training.recipe import ARMS, CURRICULA, DROPOUT_TIMES, EXIT_WEIGHTS, exit_loss_weights
from layerskip_models.training.settings import RunSettings, require, with_default

OPTIMIZERS = ("muon", "adamw")
LR_SCHEDULES = ("cosine", "wsd")
_OF_LAYERS = ("layer_dropout", "exit_weights", "last_exit_weight", "curriculum")
_EXPORTED = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunSettings):
    """One training run. Values are checked on construction: ValueError says which field, its range, what to do."""

    init: str | None = option(None, "Llama checkpoint to continue: a folder, file or name (default: from scratch).")
    tokenizer: str | None = option(None, "Tokenizer folder (default: init's, or one trained on the data).")
    holdout_fraction: float = option(
        0.01, "Share of documents kept out of training, for evaluation.", Range(0, 1, "[)")
    )

    vocab_size: int = option(4096, "Size of a tokenizer trained here (from scratch only, like the shape).", AT_LEAST_1)
    hidden_size: int = option(192, "Width of the hidden states.", AT_LEAST_1)
    num_layers: int = option(12, "Number of layers L.", Range(2))
    loops: int = option(1, "Run the layers so many times, as looped models do, with an exit after each.", Range(1, 64))
    num_heads: int = option(3, "Attention heads.", AT_LEAST_1)
    num_kv_heads: int = option(1, "Key-value heads; divides num_heads.", AT_LEAST_1)
    head_dim: int = option(64, "Width of a head.", AT_LEAST_1)
    intermediate_size: int = option(576, "Width inside the MLP.", AT_LEAST_1)
    context_length: int = option(2048, "max_position_embeddings of the model.", AT_LEAST_1)
    rope_theta: float = option(10000.0, "Base of the rotary embedding.", ABOVE_0)

    max_steps: int = option(1000, "Optimiser steps T.", AT_LEAST_1)
    batch_tokens: int = option(8192, "Tokens per optimiser step, over all processes.", AT_LEAST_1)
    micro_batch_tokens: int = option(1024, "Tokens per forward pass of one process.", AT_LEAST_1)
    sequence_length: int = option(256, "Tokens per sequence.", AT_LEAST_1)
    long_sequence_length: int = option(2048, "Tokens per sequence in the last long_steps steps.", AT_LEAST_1)
    long_steps: int = option(0, "Steps at the end with long sequences, so that long contexts work.", AT_LEAST_0)
    loss_chunk_rows: int = option(1024, "Rows whose logits exist at once.", AT_LEAST_1)
    optimizer: str = option("muon", "muon (layers' matrices; AdamW for the rest) or adamw.", OPTIMIZERS)
    learning_rate: float = option(3e-3, "Peak learning rate.", ABOVE_0)
    lr_schedule: str = option("wsd", "cosine, or wsd: constant, then to zero in decay_fraction.", LR_SCHEDULES)
    decay_fraction: float = option(0.4, "Share of the steps in which wsd goes down.", Range(0, 1, "(]"))
    warmup_steps: int = with_default(RunSettings, "warmup_steps", 30)
    weight_decay: float = option(0.1, "Decoupled weight decay of matrices (not embeddings, not norms).", AT_LEAST_0)

    compile: bool = option(False, "Compile the layers: faster, slightly different rounding; needs a C++ compiler.")

    layer_dropout: float = option(0.0, "p_max: the last layer's dropout probability at its highest.", Range(0, 1, "[)"))
    dropout_time: str = option("scratch", "S(t): scratch (rises from 0) or continual (constant 1).", DROPOUT_TIMES)
    exit_weights: str = option("uniform", "uniform, published, or L numbers separated by commas.")
    e_scale: float = option(0.2, "Scale of the lower exits in the published weights.", AT_LEAST_0)
    last_exit_weight: float = option(3.0, "The last layer's weight when uniform (each other exit has 1).", ABOVE_0)
    exit_loss: str = option(
        "uniform", "Weights of tokens in the exits' losses: uniform; cumulative or full, by accepted length.", ARMS
    )
    curriculum: str = option("rotational", "rotational, gradual, all, or none (plain training).", CURRICULA)
    rotation: int = option(4, "R of the rotational curriculum: every R-th layer, rotating.", AT_LEAST_1)

    eval_every: int = option(100, "Steps between evaluations on held-out text.", AT_LEAST_1)
    eval_tokens: int = option(8192, "Held-out tokens per evaluation.", AT_LEAST_1)
    log_every: int = with_default(RunSettings, "log_every", 10)
    keep_at: tuple[int, ...] = option(
        (), "Also keep the model of this step, in steps/STEP; repeatable.", metavar="STEP"
    )
    export_dtype: str = option("bfloat16", f"Type of the finished model: {', '.join(_EXPORTED)}.", _EXPORTED)

    operational: ClassVar[tuple[str, ...]] = (
        *RunSettings.operational, "eval_every", "eval_tokens", "keep_at", "export_dtype",
    )  # fmt: skip
    preparation: ClassVar[tuple[str, ...]] = ("tokenizer", "tokens", "log.jsonl")
    results: ClassVar[tuple[str, ...]] = ("checkpoints", "model", "steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.long_steps <= self.max_steps, "long_steps", f"at most max_steps ({self.max_steps})", self.long_steps
        )
        for step in self.keep_at:
            require(1 <= step <= self.max_steps, "keep_at", f"steps in [1, {self.max_steps}], up to max_steps", step)
        if self.exit_loss != "uniform" and self.curriculum == "none":
            raise ValueError(
                f"exit_loss {self.exit_loss} weights the losses of exits, and curriculum none trains no exit:"
                " choose another curriculum, or exit_loss uniform"
            )
        for item in fields(self):
            if self.loops > 1 and item.name in _OF_LAYERS and getattr(self, item.name) != item.default:
                raise ValueError(
                    f"with loops, the exits of all loops are trained alike: leave {item.name} at its default"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}")
        require(self.head_dim % 2 == 0, "head_dim", "even", self.head_dim)
        for length in self.sequence_lengths():
            if self.batch_tokens % length:
                raise ValueError(
                    f"batch_tokens must be a multiple of the sequence length {length}, got {self.batch_tokens}"
                )
        if self.init is None:
            longest = max(self.sequence_lengths())
            if longest > self.context_length:
                raise ValueError(
                    f"sequences of {longest} tokens are longer than context_length {self.context_length}:"
                    " shorten the sequences or raise context_length"
                )
            self.weights(self.num_layers)

    def weights(self, num_layers: int) -> list[float]:
        """Exit-loss weights e(l) before normalisation, length num_layers."""
        kind: str | list[float] = self.exit_weights
        if self.exit_weights not in EXIT_WEIGHTS:
            with contextlib.suppress(ValueError):  # exit_loss_weights names the choices
                kind = [float(number) for number in self.exit_weights.split(",")]
        return exit_loss_weights(num_layers, kind, e_scale=self.e_scale, last_exit_weight=self.last_exit_weight)

    def sequence_length_at(self, step: int) -> int:
        return self.long_sequence_length if step >= self.max_steps - self.long_steps else self.sequence_length

    def sequence_lengths(self) -> set[int]:
        """All sequence lengths of the run."""
        return {self.sequence_length_at(0), self.sequence_length_at(self.max_steps - 1)}

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return a step's learning rate: a linear rise, then a half cosine to a tenth, or constant with a linear fall."""
        if self.lr_schedule == "wsd":
            fall = min(1.0, (steps - step) / max(self.decay_fraction * steps, 1))
        else:
            fall = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        return self.learning_rate * self.warm_up(step) * fall
