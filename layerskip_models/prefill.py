"""Reading texts into their KV caches, in passes whose memory stays small however long the texts are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel

MAX_ROWS = 1024
"""Rows of a pass, so that a long text's activations stay small."""
_MASK_ELEMENTS = 4 << 20  # and rows * positions of the pass's attention mask: 16 MB in float32
_FEWEST_ROWS = 128

CaptureAt = Callable[[int, int, Tensor], None]
"""capture(first, layers_done, hidden [rows, hidden]): the first row's position, and what these layers put out."""


def piece_end(first: int, length: int, *, most: int = MAX_ROWS, together: int = 0) -> int:
    """Return where the pass ends that begins at position `first` of a text of `length` tokens.

    most: rows of a pass. together: how many of the text's last rows must all be in the last pass.
    """
    rows = most if first == 0 else min(most, max(_FEWEST_ROWS, _MASK_ELEMENTS // (first + most)))
    end = min(first + rows, length)
    if length - together < end < length:
        end = length - together if first < length - together else length
    return end


@dataclass(slots=True, eq=False)
class PromptPiece:
    """What a pass reads of a text, int64 [n], after its cache's rows, up to `end`. capture: sees what the layers put out."""

    tokens: Tensor
    cache: KVCache
    end: int
    capture: CaptureAt | None = None

    @property
    def rows(self) -> int:
        """How many."""
        return self.end - self.cache.length


def read_pieces(model: LayerSkipModel, pieces: Sequence[PromptPiece], stop: int) -> list[Tensor]:
    """Run pieces of several texts through layers [0, stop) in one pass. Returns the hidden states of each, [rows, hidden]."""
    firsts = [piece.cache.position(0, stop) for piece in pieces]
    tokens = [piece.tokens[first : piece.end] for piece, first in zip(pieces, firsts)]
    sizes = [new.numel() for new in tokens]

    def watch(layers_done: int, hidden: Tensor) -> None:
        for piece, first, part in zip(pieces, firsts, hidden.split(sizes)):
            if piece.capture is not None:
                piece.capture(first, layers_done, part)

    watched = any(piece.capture is not None for piece in pieces)
    rows = [(piece.cache, size) for piece, size in zip(pieces, sizes)]
    hidden = model.run_layers(model.embed(torch.cat(tokens)), 0, stop, rows, watch if watched else None)
    return [*hidden.split(sizes)]


def prefill(
    model: LayerSkipModel,
    tokens: Tensor,
    cache: KVCache,
    *,
    stop: int | None = None,
    capture: CaptureAt | None = None,
    most: int = MAX_ROWS,
) -> Tensor:
    """Read all tokens, int64 [n], that are not in the cache yet; through all layers, or the first `stop`.

    Returns the hidden states of the last pass, [rows, hidden], whose last row is the text's. Raises ValueError if there is
    nothing to read.
    """
    last = model.num_layers if stop is None else stop
    hidden: Tensor | None = None
    while (first := cache.position(0, last)) < tokens.numel():
        end = piece_end(first, tokens.numel(), most=most)
        (hidden,) = read_pieces(model, [PromptPiece(tokens, cache, end, capture)], last)
    if hidden is None:
        raise ValueError("the cache holds all of this text already")
    return hidden
