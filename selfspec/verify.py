"""Step 3 of a round: the remaining layers, all rows at once, on the exit hidden states that drafting stored."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kernels.native_steps import NativeSteps
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
    """What the last layer puts out, [k+1, hidden], for the rows pending, d_1..d_k.

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
    return model.run_layers(draft.exit_hidden, exit_layer, model.num_layers, cache, position, watch)


def verify_directly(
    steps: NativeSteps, num_layers: int, draft: Draft, length: int, exit_layer: int, memory: Tensor | None
) -> tuple[list[int], list[float]]:
    """The same in single calls: the target's argmax for each of these rows, and its logit.

    memory: [layers, rows, hidden], gets every layer's output for every row.
    """
    num_drafts, position = len(draft.tokens), length - 1
    if draft.num_rows == num_drafts:
        place = None if memory is None else (memory, num_drafts)
        last = draft.exit_hidden[num_drafts]
        steps.token(draft.tokens[-1], position + num_drafts, exit_layer, last, record=place)
    place = None if memory is None else (memory, 0)
    return steps.rows(draft.exit_hidden, exit_layer, num_layers, position, record=place)
