"""Drafts from many positions of one text, made by the engine's own draft loop: the training data for Pacer.

Each position is a sequence of its own, whose KV cache begins with a copy of the text's. The drafts grow side by side.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection, Iterator

from torch import Tensor

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel
from policies import DraftRow, FixedExit, NeverStop, ObservationSpec, Policy
from selfspec.engine.draft import Draft, make_drafts
from selfspec.engine.request import plain_request
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence

_CACHE_BYTES = 1 << 30  # of the copies of the text's KV cache that exist at once


class DraftRecorder(NeverStop):
    """Lets a draft go on for `behind` tokens after its first mismatch with the text, and keeps the features of its rows.

    text: the tokens that follow the draft's start.
    """

    observes = ObservationSpec(features=True)

    def __init__(self, text: abc.Sequence[int], behind: int) -> None:
        self.text, self._left = text, behind
        self._mismatch = False
        self.features: list[Tensor] = []

    def stop_before_draw(self, row: DraftRow) -> bool:
        assert row.features is not None
        self.features.append(row.features)
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        if self._mismatch:
            self._left -= 1
        self._mismatch = self._mismatch or token != self.text[row.num_drafted]
        return self._mismatch and self._left == 0

    def accepted(self, draft: abc.Sequence[int]) -> int:
        """Count the draft's tokens before its first mismatch with the text."""
        return num_matching(draft, self.text)


def num_matching(draft: abc.Sequence[int], text: abc.Sequence[int]) -> int:
    """How many tokens of a draft are the text's, up to the first that is not. text: the tokens that follow its start."""
    pairs = zip(draft, text)
    return next((place for place, (drafted, token) in enumerate(pairs) if drafted != token), len(draft))


def drafts_at(
    model: LayerSkipModel,
    cache: KVCache,
    text: Tensor,
    positions: abc.Sequence[int],
    exit_layer: int,
    *,
    window: int,
    behind: int,
    eos: Collection[int] = (),
) -> Iterator[tuple[Draft, DraftRecorder]]:
    """Draft greedily, as the engine does, from positions of a text; yield each draft with what was recorded of it.

    cache: holds the text's rows, of the first `exit_layer` layers at least. text: int64 [n]. Draft i starts when positions[i]
    tokens are committed, 1 <= positions[i] < n, and is valid until the next one is asked for. window: maximum tokens of a
    draft, which never reaches past the text's end, and ends with a drafted token of `eos`. behind: see `DraftRecorder`.
    """
    tokens, runner = text.tolist(), EagerRunner(model)
    at_once = min(max(_CACHE_BYTES // cache.num_bytes, 1), len(positions))
    copies = [KVCache(model, text.numel()) for _ in range(at_once)]
    for first in range(0, len(positions), at_once):
        recorders, drafts = [], []
        for start, copy in zip(positions[first:], copies):
            copy.take(cache, start - 1)
            recorders.append(DraftRecorder(tokens[start:], behind))
            length = min(window, len(tokens) - start)
            policy = Policy(FixedExit(exit_layer, length, num_layers=model.num_layers), recorders[-1])
            sequence = Sequence(model, copy, plain_request(text[:start].cpu(), length + 1, frozenset(eos)), policy)
            sequence.pending = tokens[start - 1]
            drafts.append(Draft(sequence, exit_layer, length))
        make_drafts(runner, drafts)
        for draft, recorder in zip(drafts, recorders):
            if draft.error is not None:
                raise draft.error
            yield draft, recorder
