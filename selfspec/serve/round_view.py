"""What a stream with show_drafts says of a round: which tokens were drafted, and what became of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.engine import Progress
from selfspec.streaming import DraftStreamer, Fate


class RoundView:
    """The rounds of one text. Their pieces that are not "rejected" are the text, stop strings included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pieces: list[tuple[str, Fate]] = []
        self._streamer = DraftStreamer(tokenizer, lambda text, fate: self._pieces.append((text, fate)))
        self._streamer.put(torch.empty(0, dtype=torch.long))  # the prompt, which is not shown

    def show(self, progress: Progress) -> dict[str, Any]:
        """exit_layer: null without speculation. pieces: text with its fate (`selfspec.streaming.Fate`)."""
        record = progress.record
        if record is not None:
            self._streamer.on_round(record)
        self._streamer.put(torch.tensor(progress.tokens, dtype=torch.long))
        if progress.result is not None:
            self._streamer.end()
        pieces, self._pieces[:] = [*self._pieces], []
        drafted, accepted = (0, 0) if record is None else record.counted_drafts
        return {
            "exit_layer": None if record is None else record.exit_layer,
            "drafted": drafted,
            "accepted": accepted,
            "pieces": [{"text": text, "fate": fate} for text, fate in pieces if text],
        }
