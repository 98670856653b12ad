"""Log-likelihoods of given texts, from one prefill pass without decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from selfspec.engine.request import check_ids
from selfspec.engine.torch_mode import engine_mode

_ROWS = 64  # whose logits are computed at a time


def continuation_scores(
    model: LayerSkipModel, context: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[tuple[float, bool]]:
    """For each continuation of a context: its log-likelihood (natural log), and whether it is the greedy one.

    context: at least one token; it is read once for all continuations. Each continuation has at least one token.
    Raises ValueError for an empty one, or if context and continuation without its last token exceed the model's context.
    """
    if not context or not all(continuations):
        raise ValueError("a context and its continuations must have at least one token each")
    longest = len(context) + max(map(len, continuations)) - 1
    if longest > model.max_positions:
        raise ValueError(f"{longest} tokens exceed this model's context of {model.max_positions}")
    scores = []
    with engine_mode(model.device):
        cache = KVCache(model, longest)
        for continuation in continuations:
            if cache.length:
                cache.roll_back(len(context) - 1)
            text = torch.tensor([*context, *continuation], dtype=torch.long, device=model.device)
            check_ids(text, model.vocab_size, from_tokenizer=True)
            scores.append(_score(model, cache, text, len(context)))
    return scores


def _score(model: LayerSkipModel, cache: KVCache, text: Tensor, num_context: int) -> tuple[float, bool]:
    """The score of the tokens after the context. The cache may already hold all rows of the context but the last."""
    kept: list[Tensor] = []
    start = num_context - 1

    def keep(first: int, layers_done: int, hidden: Tensor) -> None:
        if layers_done == model.num_layers and first + hidden.shape[0] > start:
            kept.append(hidden[max(start - first, 0) :].clone())

    prefill(model, text[:-1], cache, capture=keep)
    total, greedy = 0.0, True
    hidden, targets = torch.cat(kept), text[num_context:]
    for rows, expected in zip(hidden.split(_ROWS), targets.split(_ROWS)):
        logits = model.logits(rows)
        total += float(logits.log_softmax(-1).gather(-1, expected[:, None]).double().sum())
        greedy = greedy and bool((logits.argmax(-1) == expected).all())
    return total, greedy
