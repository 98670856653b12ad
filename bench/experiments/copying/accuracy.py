"""How well a model copies: the share of the answers' tokens that it gets right, by exit layer and in its own text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models.training.evaluation import greedy_continuations
from layerskip_models.training.recipe import exit_hidden_states

NGRAM = 4
"""A token is a copied one if it and the three before it stand together earlier in the text."""


@dataclass(slots=True)
class CopyAccuracy:
    """Counts over the answers of one task, the prompts and answers teacher-forced unless said otherwise."""

    num_prompts: int = 0
    num_tokens: int = 0
    """Tokens of the answers."""
    num_right: list[int] = field(default_factory=list)
    """Of these, those that the exit of each layer 1..L predicts."""
    num_copied: int = 0
    """Tokens of the answers that are copied ones."""
    num_copied_right: list[int] = field(default_factory=list)
    num_own_right: int = 0
    """Tokens of the answers that the model's own greedy text has too, in the same order."""
    num_own_whole: int = 0
    """Answers that the model's own greedy text gives without a fault."""


def copied_tokens(ids: Sequence[int], start: int) -> list[bool]:
    """For each token from `start` on, whether the n-gram that it ends occurs earlier in the text, prompt included."""
    seen = set()
    marks = []
    for end in range(1, len(ids) + 1):
        gram = tuple(ids[max(end - NGRAM, 0) : end])
        if end > start:
            marks.append(gram in seen)
        seen.add(gram)
    return marks


@torch.no_grad()
def exit_predictions(model: LlamaForCausalLM, ids: Tensor, start: int) -> Tensor:
    """What each exit predicts for the tokens from `start` on: int64 [L, n - start], from ids, int64 [n]."""
    states = exit_hidden_states(model, ids[None], range(len(model.model.layers)))
    rows = torch.stack([state[0, start - 1 : -1] for state in states.values()])  # [L, n - start, hidden]
    return torch.stack([model.lm_head(model.model.norm(row)).argmax(-1) for row in rows])


def add_answer(
    sums: CopyAccuracy, model: LlamaForCausalLM, prompt: Sequence[int], answer: Sequence[int], own_text: bool
) -> None:
    """Count one answer. own_text: also let the model write it, greedily."""
    ids = [*prompt, *answer]
    device_ids = torch.tensor(ids, device=model.device)
    right = exit_predictions(model, device_ids, len(prompt)) == device_ids[len(prompt) :]  # [L, answer]
    copied = torch.tensor(copied_tokens(ids, len(prompt)), device=model.device)
    sums.num_prompts += 1
    sums.num_tokens += len(answer)
    sums.num_copied += int(copied.sum())
    sums.num_right = _added(sums.num_right, right.sum(1).tolist())
    sums.num_copied_right = _added(sums.num_copied_right, right[:, copied].sum(1).tolist())
    if own_text:
        written = greedy_continuations(model, [prompt], len(answer))[0]
        blocks = SequenceMatcher(None, answer, written, autojunk=False).get_matching_blocks()
        sums.num_own_right += sum(block.size for block in blocks)
        sums.num_own_whole += written == list(answer)


def total(parts: Iterable[CopyAccuracy]) -> CopyAccuracy:
    """The counts of several tasks together."""
    result = CopyAccuracy()
    for part in parts:
        for name in ("num_prompts", "num_tokens", "num_copied", "num_own_right", "num_own_whole"):
            setattr(result, name, getattr(result, name) + getattr(part, name))
        result.num_right = _added(result.num_right, part.num_right)
        result.num_copied_right = _added(result.num_copied_right, part.num_copied_right)
    return result


def _added(sums: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more
