"""The field that `show_drafts` adds to streamed chunks: what became of each draft, in step with the text.

With `"show_drafts": true` in the body of a streamed request, every chunk has one more field:

    "selfspec": {
        "pieces": [{"text": " the", "fate": "accepted"}, {"text": " dog", "fate": "rejected"}, ...],
        "rounds": [{"exit_layer": 4, "drafted": 3, "accepted": 1, "copied": 0}, ...],
        "tokens": 2,
        "seconds": 0.125
    }

pieces: in reading order. Those that were not rejected together are exactly the chunk's text. fate: see
`selfspec.detokenize.TokenSource`, except that an accepted copy is "accepted" with an additional `"copied": true`.
rounds: those that ended since the last chunk; exit_layer is null for a round without an exit. copied: how many of the drafts
were copied from earlier text. They come first, so min(copied, accepted) of them were accepted.
tokens: committed since the last chunk. seconds: from the request's arrival in the queue to the last of them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.detokenize import DraftStreamer, SourcedText
from selfspec.serve.api_responses import Piece


class DraftLog:
    """Keeps the tokens of one text with their fates until their text is sent.

    The server may hold text back, because it could be the beginning of a stop string, or cut it there. So `take` is told how
    much text is sent, and returns the pieces of exactly that text. prompt: the ids that it follows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor) -> None:
        self._pieces = SourcedText()
        self._streamer = DraftStreamer(tokenizer, self._pieces.add)
        self._streamer.put(prompt)
        self._rounds: list[dict[str, int | None]] = []
        self._tokens = 0
        self._seconds = 0.0

    def add(self, piece: Piece) -> None:
        """Add what steps brought. At the end of the text, an incomplete character becomes text."""
        self._seconds = piece.seconds
        for step in piece.steps:
            self._tokens += len(step.tokens)
            if step.record is not None:
                drafted, accepted = step.record.counted_drafts
                copied, _ = step.record.counted_copies
                self._rounds.append(
                    {"exit_layer": step.record.exit_layer, "drafted": drafted, "accepted": accepted, "copied": copied}
                )
                self._streamer.on_round(step.record)
            self._streamer.put(torch.tensor(step.tokens, dtype=torch.int64))
            if step.result is not None:
                self._streamer.end()

    def take(self, length: int) -> dict[str, Any]:
        """Take the field of a chunk with `length` characters of text, which must have been added."""
        pieces = [
            {"text": text, "fate": "accepted", "copied": True} if fate == "copied" else {"text": text, "fate": fate}
            for text, fate in self._pieces.take(length)
        ]
        field = {"pieces": pieces, "rounds": self._rounds, "tokens": self._tokens, "seconds": self._seconds}
        self._rounds, self._tokens = [], 0
        return field
