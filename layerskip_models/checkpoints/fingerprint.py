"""Numbers that tell the weights of one model from another's, for what was trained for one model only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel
from layerskip_models.prefill import prefill

_PROBE_TOKENS = 8
_LEAST_COSINE = 0.99  # half precision stays above .999; other weights of the same shape are far below


def fingerprint(model: LayerSkipModel) -> tuple[float, ...]:
    """16 numbers that tell a model's weights from others of its shape, whatever their dtype, device and layout.

    Logits of some tokens after a fixed short text, less their mean: all weights have a part in them.
    """
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=model.device) * 7919 % model.vocab_size
    with torch.inference_mode():
        hidden = prefill(model, tokens, KVCache(model, _PROBE_TOKENS))
        logits = model.logits(hidden[-1:])[0]
        chosen = logits[torch.arange(1, 17, device=logits.device) * 104729 % logits.shape[0]]
        return tuple(round(value, 4) for value in (chosen - chosen.mean()).tolist())


def same_weights(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two fingerprints are of the same weights, perhaps in another dtype or layout."""
    if len(one) != len(other):
        return False
    numbers = torch.tensor([one, other], dtype=torch.float32, device="cpu")
    return float(torch.cosine_similarity(numbers[0], numbers[1], dim=0)) >= _LEAST_COSINE
