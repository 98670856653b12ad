"""PreVerifierTraining: every option of `selfspec train-pacer`, with its meaning and its check."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import ClassVar

from layerskip_models.training.settings import (
    AT_LEAST_0,
    AT_LEAST_1,
    FrozenModelSettings,
    Range,
    option,
    with_default,
)
from selfspec.pacer.network import ESTIMATES, SCOPES

MODEL_FOLDER = "preverifier"
"""The folder of the finished pre-verifier in output_dir."""


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The options that decide how drafts are made."""

    exit_layers: tuple[int, ...] = option((), "Exit layer to train for; repeatable (default: a quarter of the layers).")
    response_tokens: int = option(128, "Maximum length of a response in tokens.", Range(3))
    window: int = option(50, "Tokens per draft, fewer at the response's end.", AT_LEAST_1)
    behind: int = option(
        4, "Tokens that a draft goes on for after its first mismatch; the window for the paper's labels.", AT_LEAST_0
    )
    positions: int = option(48, "Positions to draft from, a random sample of each response's; 0 for all.", AT_LEAST_0)
    ignore_eos: bool = option(False, "Neither responses nor drafts end with an EOS token.")
    shard_responses: int = option(16, "Responses per file of data, the most that an interruption loses.", AT_LEAST_1)
    seed: int = with_default(FrozenModelSettings, "seed", 0)


@dataclass(frozen=True, kw_only=True)
class PreVerifierTraining(DataPlan, FrozenModelSettings):
    """One run, data and training. Checked on construction: ValueError says which field, its range, what to do."""

    data: tuple[str, ...] = option(
        MISSING,
        "PATH[:share] of prompts: .txt, .txt.gz, .py, a folder of them, or .jsonl[.gz] with a prompt a line.",
    )
    data_of: str | None = option(
        None,
        "Folder of another run whose data to use, instead of making the same again: options of data must be equal.",
    )
    num_prompts: int = option(1000, "Maximum number of responses to train on.", AT_LEAST_1)
    num_held_out: int = option(64, "Maximum number of responses to evaluate on.", AT_LEAST_1)

    position_embedding: bool = option(True, "Give the network the position of each token in its draft.")
    features: bool = option(True, "Give the network confidence, margin and entropy of each draft token's distribution.")
    estimates: str = option(
        "conditional",
        "What is estimated: conditional (given that earlier drafts hold), or prefix, as in the paper.",
        ESTIMATES,
    )
    scope: str = option("full", "What a draft token attends to: full, draft, or block.", SCOPES)
    block: int = option(4, "Block size for scope block.", AT_LEAST_1)

    batch_responses: int = option(
        4, "Responses, each at one exit layer, per optimiser step, over all processes.", AT_LEAST_1
    )
    warmup_steps: int = with_default(FrozenModelSettings, "warmup_steps", 40)
    weight_decay: float = with_default(FrozenModelSettings, "weight_decay", 0.05)

    results: ClassVar[tuple[str, ...]] = ("data", "checkpoints", MODEL_FOLDER)

    def data_plan(self, exit_layers: tuple[int, ...]) -> DataPlan:
        """Collect the options of the data, for these exits."""
        shared = {item.name: getattr(self, item.name) for item in fields(DataPlan)}
        return DataPlan(**{**shared, "exit_layers": exit_layers})

    @property
    def data_folder(self) -> Path:
        return Path(self.data_of or self.output_dir) / "data"
