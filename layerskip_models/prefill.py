"""Reading a text into its KV cache, in passes whose memory stays small however long it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel

MOST_ROWS = 1024
"""Rows of a pass, so that a long text's activations stay small."""
_MASK_ELEMENTS = 4 << 20  # and rows * positions of the pass's attention mask: 16 MB in float32
_FEWEST_ROWS = 128

CaptureAt = Callable[[int, int, Tensor], None]
"""capture(first, layers_done, hidden [rows, hidden]): the first row's position, and what these layers put out."""


def piece_end(first: int, length: int, *, most: int = MOST_ROWS, together: int = 0) -> int:
    """Where the pass ends that begins at position `first` of a text of `length` tokens.

    most: rows of a pass. together: so many of the text's last rows shall all be in the last pass.
    """
    rows = most if first == 0 else min(most, max(_FEWEST_ROWS, _MASK_ELEMENTS // (first + most)))
    end = min(first + rows, length)
    if length - together < end < length:
        end = length - together if first < length - together else length
    return end


def read_piece(
    model: LayerSkipModel, tokens: Tensor, cache: KVCache, stop: int, end: int, capture: CaptureAt | None = None
) -> Tensor:
    """Run the tokens behind those that the cache holds, up to `end`, through layers [0, stop). tokens: int64 [n].

    Returns their hidden states, [rows, hidden].
    """
    first = cache.position(0, stop)
    watch = None if capture is None else partial(capture, first)
    return model.run_layers(model.embed(tokens[first:end]), 0, stop, cache, watch)


def prefill(
    model: LayerSkipModel,
    tokens: Tensor,
    cache: KVCache,
    *,
    stop: int | None = None,
    capture: CaptureAt | None = None,
    most: int = MOST_ROWS,
) -> Tensor:
    """Read all tokens, int64 [n], that are not in the cache yet; through all layers, or the first `stop`.

    Returns the hidden states of the last pass, [rows, hidden], whose last row is the text's. Raises ValueError if there is
    nothing to read.
    """
    last = model.num_layers if stop is None else stop
    hidden: Tensor | None = None
    while (first := cache.position(0, last)) < tokens.numel():
        hidden = read_piece(model, tokens, cache, last, piece_end(first, tokens.numel(), most=most), capture)
    if hidden is None:
        raise ValueError("the cache holds all of this text already")
    return hidden
