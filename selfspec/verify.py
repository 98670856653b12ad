"""Step 3 of a round: the remaining layers turn the stored exit hidden states into target logits, all rows at once."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from layerskip_models import LayerSkipModel
from selfspec.draft import Capture, Draft
from selfspec.kv_cache import KVCache


def verify(
    model: LayerSkipModel,
    draft: Draft,
    length: int,
    exit_layer: int,
    cache: KVCache,
    capture: Capture | None = None,
) -> Tensor:
    """Target logits, float32 [k+1, vocab], for the rows pending, d_1..d_k.

    length: committed tokens; the pending row is at position length - 1.
    capture: called as capture(first_row, layers_done, hidden) for every layer run here.
    Layers [0, E) run for the last row only, and only if drafting did not run it: no layer runs twice for a row.
    """
    num_drafts = len(draft.tokens)
    position = length - 1
    if draft.num_rows == num_drafts:
        watch = None if capture is None else partial(capture, num_drafts)
        last = model.embed_one(draft.tokens[-1])
        last = model.run_layers(last, 0, exit_layer, cache, position + num_drafts, watch)
        draft.exit_hidden[num_drafts] = last[0]
    watch = None if capture is None else partial(capture, 0)
    hidden = model.run_layers(draft.exit_hidden, exit_layer, model.num_layers, cache, position, watch)
    return model.logits(hidden)
