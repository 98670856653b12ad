"""The runs of the study of exit losses: one checkpoint continued with each arm and seed, on the same text for as many steps.

They continue a trained checkpoint rather than start from scratch. At random weights every token's probability is close
to 0, so no draft is accepted anywhere, and smoothed weights by accepted length say nothing but alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from layerskip_models.text_files import write_text
from layerskip_models.training.accepted_length import ARMS
from layerskip_models.training.documents import END_OF_TEXT, parse_data_source, split_sources
from layerskip_models.training.training_config import TrainingConfig

OWN_TEXT_PROMPT = 32
"""Tokens of a training document before the model's own text."""
_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How the tokens of an exit's loss are weighted. alpha: None when uniform."""

    loss: str
    alpha: float | None = None

    @property
    def name(self) -> str:
        return self.loss if self.alpha is None else f"{self.loss}:{self.alpha:g}"


def parse_arm(text: str) -> Arm:
    """`uniform`, `cumulative:ALPHA` or `full:ALPHA`. Raises ValueError for anything else."""
    loss, colon, alpha = text.partition(":")
    try:
        value = float(alpha) if colon else None
    except ValueError:
        value = -1.0
    if loss not in ARMS or (loss == "uniform") != (value is None) or (value is not None and not 0 <= value <= 1):
        raise ValueError(f"an arm is uniform, cumulative:ALPHA or full:ALPHA with ALPHA in [0, 1], got {text!r}")
    return Arm(loss=loss, alpha=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What all runs share. exits: the first so many exits have a loss, each at every step, with weight 1."""

    data: tuple[str, ...]
    exclude: tuple[str, ...]
    init: str
    num_layers: int
    work_dir: Path
    max_steps: int
    batch_tokens: int
    sequence_length: int
    learning_rate: float
    block: int
    exits: int

    @property
    def own_text_path(self) -> Path:
        return self.work_dir / "own_text.txt"

    def run_config(self, arm: Arm, seed: int) -> TrainingConfig:
        """The training run of an arm and a seed. Seeds differ in which documents are drawn and in their order."""
        below = self.num_layers - 1
        weights = [1 if layer < self.exits else 0 for layer in range(below)]
        return TrainingConfig(
            data=(*self.data, str(self.own_text_path)),
            exclude=self.exclude,
            init=self.init,
            output_dir=str(self.work_dir / f"{arm.name.replace(':', '-')}-seed{seed}"),
            max_steps=self.max_steps,
            batch_tokens=self.batch_tokens,
            sequence_length=self.sequence_length,
            learning_rate=self.learning_rate,
            warmup_steps=2,
            decay_fraction=0.9,
            curriculum="all",
            exit_weights=",".join(map(str, [*weights, self.exits])),
            exit_loss=arm.loss,
            exit_loss_alpha=0.5 if arm.alpha is None else arm.alpha,
            exit_loss_block=self.block,
            eval_every=self.max_steps,
            eval_tokens=self.sequence_length,
            log_every=1,
            save_every=self.max_steps,
            export_dtype="float32",
            seed=seed,
        )


def write_own_text(
    study: Study, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, num_texts: int, num_tokens: int
) -> None:
    """Let the model continue the beginnings of training documents, sampled at temperature 1; unless that was done.

    An accepted prefix is the target's own text, so that is the text on which an exit drafts. A sample of the model is
    also text on which its last layer has nothing to learn.
    Raises ValueError when the documents are too short.
    """
    if study.own_text_path.exists():
        return
    study.work_dir.mkdir(parents=True, exist_ok=True)
    by_source, _ = split_sources([parse_data_source(text) for text in study.data], study.exclude, 0.01)
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = []
    each = -(-num_texts // len(by_source))
    for _, documents in by_source:
        chosen = [documents[index] for index in rng.permutation(len(documents))[: 4 * each]]
        encoded = tokenizer(chosen, add_special_tokens=False, verbose=False)["input_ids"]
        prompts += [ids[:OWN_TEXT_PROMPT] for ids in encoded if len(ids) >= OWN_TEXT_PROMPT][:each]
    if not prompts:
        raise ValueError(
            f"no training document has {OWN_TEXT_PROMPT} tokens, the beginning of a text of its own: add data"
        )
    torch.manual_seed(0)
    pieces: list[str] = []
    for start in range(0, len(prompts), _BATCH):
        ids = torch.tensor(prompts[start : start + _BATCH])
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=[],
            pad_token_id=0,
        )
        pieces += [piece for row in written for piece in tokenizer.decode(row).split(END_OF_TEXT) if piece.strip()]
    write_text(study.own_text_path, f"\n{END_OF_TEXT}\n".join(pieces) + "\n")


def arms_and_seeds(arms: Sequence[Arm], num_seeds: int) -> list[tuple[Arm, int]]:
    """All runs, seed by seed, so that a study that breaks off has compared all arms."""
    return [(arm, seed) for seed in range(num_seeds) for arm in arms]
