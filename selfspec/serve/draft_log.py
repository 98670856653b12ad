"""The extension of streamed chunks that `show_drafts` asks for: what became of each draft, in step with the text.

With `"show_drafts": true` in the body of a streamed request, every chunk has one more field:

    "selfspec": {
        "pieces": [{"text": " the", "fate": "accepted"}, {"text": " dog", "fate": "rejected"}, ...],
        "rounds": [{"exit_layer": 4, "drafted": 3, "accepted": 1, "copied": 0}, ...],
        "tokens": 2,
        "seconds": 0.125
    }

pieces: in reading order. Those that were not rejected are, put together, exactly the chunk's text. fate: see
`selfspec.streaming.Fate`, but that an accepted copy is "accepted", too, and says `"copied": true` beside it.
rounds: that ended since the last chunk; exit_layer is null for a round in which no exit took part. copied: how many of the
drafts were copied from earlier text. They come first, so min(copied, accepted) of them were accepted.
tokens: committed since the last chunk. seconds: from the request's arrival in the queue to the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.serve.scheduler import Update
from selfspec.streaming import DraftStreamer, Fate


class DraftLog:
    """Keeps the tokens of one text with their fates until their text is sent.

    A server may hold text back, because it could be the beginning of a stop string, or cut it there. So `take` is told how
    much text is sent, and gives the pieces that make up exactly that text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._streamer = DraftStreamer(tokenizer, lambda text, fate: self._pieces.append((text, fate)))
        self._streamer.put(torch.empty(0, dtype=torch.int64))  # the prompt, which is not shown
        self._pieces: deque[tuple[str, Fate]] = deque()
        self._rounds: list[dict[str, int | None]] = []
        self._tokens = 0
        self._seconds = 0.0

    def add(self, updates: Sequence[Update]) -> None:
        """What steps brought. A complete text's incomplete character becomes text."""
        for update in updates:
            record, tokens = update.progress.record, update.progress.tokens
            self._tokens += len(tokens)
            self._seconds = update.seconds
            if record is not None:
                drafted, accepted = record.counted_drafts
                copied, _ = record.counted_copies
                self._rounds.append(
                    {"exit_layer": record.exit_layer, "drafted": drafted, "accepted": accepted, "copied": copied}
                )
                self._streamer.on_round(record)
            self._streamer.put(torch.tensor(tokens, dtype=torch.int64))
            if update.result is not None:
                self._streamer.end()

    def take(self, length: int) -> dict[str, Any]:
        """The field of a chunk with `length` characters of text, which must be known."""
        pieces: list[dict[str, str | bool]] = []
        while length or (self._pieces and self._pieces[0][1] == "rejected"):
            text, fate = self._pieces.popleft()
            if fate != "rejected":
                if len(text) > length:
                    self._pieces.appendleft((text[length:], fate))
                    text = text[:length]
                length -= len(text)
            if text:
                copied = fate == "copied"
                pieces.append(
                    {"text": text, "fate": "accepted", "copied": True} if copied else {"text": text, "fate": fate}
                )
        field = {"pieces": pieces, "rounds": self._rounds, "tokens": self._tokens, "seconds": self._seconds}
        self._rounds, self._tokens = [], 0
        return field
