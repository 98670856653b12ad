"""`selfspec train-pacer` and `train-exit`; `train` is `layerskip_models.training.loop.train_command`."""

from __future__ import annotations

from layerskip_models.training.settings import command_for_config
from selfspec.exits.settings import ExitTraining
from selfspec.exits.training import train_exit
from selfspec.pacer.settings import PreVerifierTraining
from selfspec.pacer.training import train_preverifier

train_pacer_command = command_for_config(
    train_preverifier,
    PreVerifierTraining,
    "Train Pacer's pre-verifier for a LayerSkip checkpoint.",
    "selfspec generate --policy pacer:{}",
)
train_exit_command = command_for_config(
    train_exit,
    ExitTraining,
    "Train exit adapters for a frozen checkpoint: its drafts get better, and its output stays the same.",
    "selfspec generate --model MODEL --exits {}",
)
