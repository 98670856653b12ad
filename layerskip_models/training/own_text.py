"""Training on the model's own greedy text: lower exits learn to say it, all unlearn its loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models.training.evaluation import greedy_continuations
from layerskip_models.training.recipe import IGNORED

NGRAM = 4
ALLOWED = 2  # occurrences of an n-gram before it counts as a loop; maths and code repeat themselves once or twice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnText:
    """Prompts with the model's greedy continuations, as a batch for early_exit_backward."""

    input_ids: Tensor  # int64 [rows, length]
    last_labels: Tensor  # int64 [rows, length]: tokens that close a loop, else IGNORED
    labels: Tensor  # int64 [rows, length]: every token of the continuations, else IGNORED; for the exits below
    loops: Tensor  # bool [rows, length]: the label closes a loop


def closes_loop(tokens: list[int]) -> list[bool]:
    """For each token, True if the 4-gram that ends with it has occurred ALLOWED times before."""
    seen: Counter[tuple[int, ...]] = Counter()
    marks = []
    for end in range(1, len(tokens) + 1):
        gram = tuple(tokens[end - NGRAM : end]) if end >= NGRAM else None
        marks.append(gram is not None and seen[gram] >= ALLOWED)
        if gram is not None:
            seen[gram] += 1
    return marks


def own_text(model: LlamaForCausalLM, prompts: Tensor, num_tokens: int) -> OwnText:
    """Continue prompts, int64 [rows, prompt length], greedily by num_tokens, and label the continuations.

    The last layer has a loss only where a token closes a loop (unlikelihood, Welleck et al. 2020, "Neural Text Generation
    with Unlikelihood Training", section 5.2; it penalises every repeated n-gram, this one those seen ALLOWED times before).
    The exits below it also learn its other tokens: distillation of the last layer on the text that greedy decoding meets.
    """
    was_training = model.training
    continuations = greedy_continuations(model, prompts.tolist(), num_tokens)
    model.train(was_training)
    written = torch.tensor(continuations, device=prompts.device)
    ids = torch.cat([prompts, written], dim=1)
    loops = torch.zeros_like(ids, dtype=torch.bool)
    loops[:, prompts.shape[1] :] = torch.tensor([closes_loop(row) for row in continuations], device=ids.device)
    labels = ids.clone()
    labels[:, : prompts.shape[1]] = IGNORED
    return OwnText(
        input_ids=ids[:, :-1],
        last_labels=labels.masked_fill(~loops, IGNORED)[:, 1:],
        labels=labels[:, 1:],
        loops=loops[:, 1:],
    )
