"""How far a model with weights in fewer bits is from the one with all bits, on given texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.engine.request import encode_prompt
from selfspec.generator import SelfSpecGenerator

SAMPLE = Path(__file__).with_name("sample_text.txt")
"""A text of a thousand words, of several kinds, where the user gives none."""
_CHUNK = 128  # rows whose logits exist at a time, of both models


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightQuality:
    """Over all tokens but the first of each text. Divergences in nats.

    perplexity, full_perplexity: of the model, and of the one with all bits. divergence: KL(full || model), the mean over
    positions. agreement: share of positions at which both have the same likeliest token. num_tokens: how many were predicted.
    """

    perplexity: float
    full_perplexity: float
    divergence: float
    agreement: float
    num_tokens: int


def quality(model: LayerSkipModel, full: LayerSkipModel, texts: Sequence[Tensor]) -> WeightQuality:
    """Compare two models on texts, int64 [n] each, cut to the context. Raises ValueError without a text of 2 tokens."""
    texts = [text[: min(model.max_positions, full.max_positions)] for text in texts if len(text) > 1]
    if not texts:
        raise ValueError("comparing two models needs a text of at least 2 tokens")
    sums, count = torch.zeros(4, dtype=torch.float64, device="cpu"), 0
    with torch.inference_mode():
        for text in texts:
            caches = [KVCache(one, len(text)) for one in (model, full)]
            for chunk in range(0, len(text) - 1, _CHUNK):
                rows = text[chunk : min(chunk + _CHUNK, len(text) - 1)]
                following = text[chunk + 1 : chunk + 1 + len(rows)]
                ours, theirs = (
                    one.logits(one.run_layers(one.embed(rows.to(one.device)), 0, one.num_layers, cache))
                    .cpu()
                    .log_softmax(-1)
                    for one, cache in zip((model, full), caches)
                )
                sums += torch.stack(
                    [
                        -ours.gather(1, following[:, None]).sum(),
                        -theirs.gather(1, following[:, None]).sum(),
                        (theirs.exp() * (theirs - ours)).sum(),
                        (ours.argmax(-1) == theirs.argmax(-1)).sum(),
                    ]
                ).double()
                count += len(rows)
    own, others, divergence, same = (sums / count).tolist()
    return WeightQuality(
        perplexity=math.exp(own),
        full_perplexity=math.exp(others),
        divergence=divergence,
        agreement=same,
        num_tokens=count,
    )


def quality_lines(generator: SelfSpecGenerator, full: LayerSkipModel, texts: Sequence[str]) -> list[str]:
    """The comparison of a generator's model as text, with what both models read for a token. Raises as `quality`."""
    model, tokenizer = generator.model, generator.tokenizer
    assert tokenizer is not None
    found = quality(model, full, [encode_prompt(text, tokenizer, model.vocab_size) for text in texts if text])
    size, full_size = (one.num_layers * one.layer_bytes + one.head_bytes for one in (model, full))
    return [
        f"these weights against the full ones, over {found.num_tokens:,} tokens: perplexity {found.perplexity:.2f} (full"
        f" {found.full_perplexity:.2f}), KL divergence {found.divergence:.4f} nats, same likeliest token"
        f" {found.agreement:.1%}",
        f"a token reads {size / 1e6:,.1f} MB of weights (full {full_size / 1e6:,.1f} MB)",
    ]
