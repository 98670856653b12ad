"""PreVerifierTraining: every option of `selfspec train-pacer`, with its meaning and its check."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from layerskip_models.training.documents import DEFAULT_EXCLUDES, DataSource, parse_data_source
from layerskip_models.training.training_config import option, require
from selfspec.pacer.network import ESTIMATES, SCOPES


@dataclass(frozen=True, slots=True, kw_only=True)
class PreVerifierTraining:
    """One run, data and training. Checked on construction: ValueError says which field, its range, what to do."""

    data: tuple[str, ...] = field(
        metadata={
            "help": "PATH[:share] of prompts: .txt, .txt.gz, .py, a folder of them, or .jsonl[.gz] with a prompt a line."
        }
    )
    output_dir: str = field(metadata={"help": "Folder for data, log, checkpoints and the finished pre-verifier."})
    model: str | None = option(None, "LayerSkip checkpoint: hub name or folder (default: the demo model).")
    dtype: str = option("auto", "The model's: auto, float32, bfloat16, float16.")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    exit_layers: tuple[int, ...] = option((), "Exit layer to judge; repeatable (default: a quarter of the layers).")
    evaluate_on: tuple[str, ...] = option(
        (), "Prompts for the held-out figures, as for data (default: held-out documents of data)."
    )
    exclude: tuple[str, ...] = option(DEFAULT_EXCLUDES, "Names of folders and files to leave out of folders.")
    holdout_fraction: float = option(0.02, "Share of the documents kept out of training, for evaluation.")

    data_of: str | None = option(
        None,
        "Folder of another run whose data to use, instead of making the same ones again: options of data must be equal.",
    )
    num_prompts: int = option(1000, "Responses to train on.")
    num_held_out: int = option(64, "Responses to evaluate on.")
    prompt_tokens: int = option(256, "Maximum prompt length in tokens; pieces of text have at least an eighth of it.")
    response_tokens: int = option(128, "Maximum length of a response in tokens.")
    window: int = option(50, "Tokens per draft, fewer at the response's end.")
    behind: int = option(
        4, "Tokens that a draft goes on for behind its first mismatch; the window for the paper's labels."
    )
    positions: int = option(48, "Positions to draft from, a random sample of each response's; 0 for all.")
    ignore_eos: bool = option(False, "Neither responses nor drafts end with an EOS token.")
    shard_responses: int = option(16, "Responses per file of data, the most that an interruption loses.")

    position_embedding: bool = option(True, "Give the network the position of each token in its draft.")
    features: bool = option(True, "Give the network confidence, margin and entropy of each draft token's distribution.")
    estimates: str = option(
        "conditional", "What is estimated: conditional (given that earlier drafts hold), or prefix, as in the paper."
    )
    scope: str = option("full", "What a draft token attends to: full, draft, or block.")
    block: int = option(4, "Block size for scope block.")

    epochs: float = option(4.0, "Passes over the data.")
    batch_responses: int = option(4, "Responses, each at one exit layer, per optimiser step, over all processes.")
    learning_rate: float = option(
        1e-3, "Peak learning rate; it rises over warmup_steps and falls to 0 in a half cosine."
    )
    warmup_steps: int = option(40, "Steps in which the learning rate rises.")
    weight_decay: float = option(0.05, "Decoupled weight decay of matrices.")
    max_grad_norm: float = option(1.0, "Maximum norm of the gradient.")
    precision: str = option("fp32", "fp32, or bf16 for autocast.")
    log_every: int = option(20, "Steps between lines in the log.")
    save_every: int = option(100, "Steps between checkpoints, the most that an interruption loses.")
    seed: int = option(0, "Random seed.")

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data must name at least one file or folder (--data PATH[:share])")
        for paths in (self.data, self.evaluate_on):
            self.sources(paths)
        for name in (
            "num_prompts", "num_held_out", "prompt_tokens", "response_tokens", "window", "shard_responses", "block",
            "batch_responses", "log_every", "save_every",
        ):  # fmt: skip
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("positions", "behind", "warmup_steps", "weight_decay", "seed"):
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("epochs", "learning_rate", "max_grad_norm"):
            require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        require(0 < self.holdout_fraction < 1, "holdout_fraction", "in (0, 1)", self.holdout_fraction)
        require(self.response_tokens >= 3, "response_tokens", "at least 3", self.response_tokens)
        for name, choices in (("scope", SCOPES), ("estimates", ESTIMATES), ("precision", ("fp32", "bf16"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @property
    def data_folder(self) -> Path:
        """Where the draft traces lie, or will."""
        return Path(self.data_of or self.output_dir) / "data"

    @staticmethod
    def sources(paths: tuple[str, ...]) -> list[DataSource]:
        return [parse_data_source(text) for text in paths]


OPERATIONAL_FIELDS = ("output_dir", "device", "log_every", "save_every")
"""What may differ when a run is taken up again."""
