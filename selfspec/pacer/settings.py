"""PreVerifierTraining: every option of `selfspec train-pacer`, with its meaning and its check."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from layerskip_models.training.settings import (
    AT_LEAST_0,
    AT_LEAST_1,
    FrozenModelSettings,
    Range,
    option,
    with_default,
)
from selfspec.pacer import OURS, PAPER

MODEL_FOLDER = "preverifier"
"""The folder of the finished pre-verifier in output_dir."""


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The options that decide how drafts are made."""

    exit_layers: tuple[int, ...] = option((), "Exit layer to train for; repeatable (default: a quarter of the layers).")
    response_tokens: int = option(128, "Maximum length of a response in tokens.", Range(3))
    window: int = option(50, "Tokens per draft, fewer at the response's end.", AT_LEAST_1)
    behind: int = option(4, "Tokens that a draft goes on for after its first mismatch.", AT_LEAST_0)
    positions: int = option(48, "Positions to draft from, a random sample of each response's; 0 for all.", AT_LEAST_0)
    ignore_eos: bool = option(False, "Neither responses nor drafts end with an EOS token.")
    seed: int = with_default(FrozenModelSettings, "seed", 0)
    design: str = option(
        OURS,
        "ours; or paper: hidden states and positions alone, every token of a draft labelled, b=4, t=.7.",
        (OURS, PAPER),
    )


@dataclass(frozen=True, kw_only=True)
class PreVerifierTraining(DataPlan, FrozenModelSettings):
    """One run, data and training. Checked on construction: ValueError says which field, its range, what to do."""

    data: tuple[str, ...] = option(
        MISSING,
        "PATH[:share] of prompts: .txt, .txt.gz, .py, a folder of them, or .jsonl[.gz] with a prompt a line.",
    )
    num_prompts: int = option(1000, "Maximum number of responses to train on.", AT_LEAST_1)
    num_held_out: int = option(64, "Maximum number of responses to evaluate on.", AT_LEAST_1)
    batch_responses: int = option(
        4, "Responses, each at one exit layer, per optimiser step, over all processes.", AT_LEAST_1
    )
    warmup_steps: int = with_default(FrozenModelSettings, "warmup_steps", 40)
    weight_decay: float = with_default(FrozenModelSettings, "weight_decay", 0.05)

    results: ClassVar[tuple[str, ...]] = ("data", "checkpoints", MODEL_FOLDER)
