"""Drafts from many positions of one text, made by the engine's own draft loop: the training data for Pacer.

Each position is a sequence of its own, whose KV cache begins with a copy of the text's. The drafts grow side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor
from transformers import LogitsProcessorList

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel
from policies import DraftRow, FixedExit, NeverStop, ObservationSpec, Policy
from selfspec.engine.draft import Draft, make_drafts
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.runners.runner import SequenceRound
from selfspec.engine.sampling import Sampler

_CACHE_BYTES = 1 << 30  # of the copies of the text's KV cache that exist at once


class DraftRecorder(NeverStop):
    """Lets a draft go on for `behind` tokens after its first mismatch with the text, and keeps the features of its rows.

    text: the tokens that follow the draft's start.
    """

    observes = ObservationSpec(features=True)

    def __init__(self, text: Sequence[int], behind: int) -> None:
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

    def accepted(self, draft: Sequence[int]) -> int:
        """The number of the draft's tokens before its first mismatch with the text."""
        return next((place for place, token in enumerate(draft) if token != self.text[place]), len(draft))


class PositionDrafter:
    """Drafts greedily, as the engine does, from positions of a text.

    cache: holds the text's rows, of the first exit layers at least. text: int64 [n]. window: maximum tokens of a draft, which
    never reaches past the text's end, and ends with a drafted token of `eos`. behind: see `DraftRecorder`.
    """

    def __init__(
        self,
        model: LayerSkipModel,
        cache: KVCache,
        text: Tensor,
        *,
        window: int,
        behind: int,
        eos: Collection[int] = (),
    ) -> None:
        self._model, self._cache, self._text, self._tokens = model, cache, text, text.tolist()
        self._window, self._behind, self._eos = window, behind, frozenset(eos)
        self._runner = EagerRunner(model)
        self._copies: list[KVCache] = []

    def drafts(self, positions: Sequence[int], exit_layer: int) -> Iterator[tuple[Draft, DraftRecorder]]:
        """The draft of each position, with what was recorded of it. It is valid until the next one is asked for.

        Draft i starts when positions[i] tokens are committed, 1 <= positions[i] < n.
        """
        at_once = min(max(_CACHE_BYTES // self._cache.num_bytes, 1), len(positions))
        while len(self._copies) < at_once:
            self._copies.append(KVCache(self._model, self._text.numel()))
        for first in range(0, len(positions), at_once):
            recorders, turns = [], []
            for start, copy in zip(positions[first:], self._copies):
                copy.take(self._cache, start - 1)
                recorders.append(DraftRecorder(self._tokens[start:], self._behind))
                turns.append(self._round(start, copy, recorders[-1], exit_layer))
            for draft, recorder in zip(make_drafts(self._runner, turns), recorders):
                if draft.error is not None:
                    raise draft.error
                yield draft, recorder

    def _round(self, start: int, cache: KVCache, recorder: DraftRecorder, exit_layer: int) -> SequenceRound:
        length = min(self._window, len(self._tokens) - start)
        exit_policy = FixedExit(exit_layer, length, num_layers=self._model.num_layers)
        return SequenceRound(
            cache=cache,
            tokens=self._text.unsqueeze(0),
            length=start,
            pending=self._tokens[start - 1],
            exit_layer=exit_layer,
            max_speculations=length,
            sampler=Sampler(LogitsProcessorList(), None),
            policy=Policy(exit_policy, recorder),
            observes=recorder.observes,
            eos=self._eos,
            states=None,
            learns=False,
        )
