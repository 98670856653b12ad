"""Committed text as it comes; on request the drafts too, and what became of each.

transformers' TextStreamer holds text back until a space and decodes every line afresh, which loses the space that a line
of a SentencePiece tokenizer (Llama 2) begins with. Here a chunk is out as soon as its characters are complete, and the
chunks put together are exactly `tokenizer.decode(new_tokens, skip_special_tokens=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from policies import RoundRecord

Fate = Literal["target", "accepted", "copied", "corrected", "bonus", "rejected"]
"""Where a token comes from: the full model alone; a draft of an exit that it accepted; a draft copied from the text that it
accepted; its own token in a rejected draft's place; its own token behind a draft that was accepted whole; a draft that was
not committed, from an exit or copied."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class IncrementalDecoder:
    """Turns tokens into text as they come, never in the middle of a character.

    Each piece is decoded behind the tokens of the piece before it, so that a tokenizer that strips the space in front of
    a text does not strip it from every piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._context: list[int] = []  # its text is out
        self._pending: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is now certain; "" while a character is incomplete."""
        self._pending.extend(tokens)
        text = self.peek([])
        if not self._pending or text.endswith(_REPLACEMENT) or self._ends_in_byte_token():
            return ""
        # Tokens without text (special ones) give the next piece no left neighbour, so what was there stays.
        self._context = self._pending if text else self._context + self._pending
        self._pending = []
        return text

    def peek(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` would add, complete or not, behind what `push` returned; nothing is kept."""
        before = self._decode(self._context)
        return self._decode([*self._context, *self._pending, *tokens])[len(before) :]

    def finish(self) -> str:
        """The rest, incomplete characters as U+FFFD; the decoder is then as new."""
        text = self.peek([])
        self._context, self._pending = [], []
        return text

    def _ends_in_byte_token(self) -> bool:
        """Whether a run of SentencePiece's byte tokens may go on: only a run as a whole is text or is not.

        Special tokens have no text, so a run goes on behind them.
        """
        last = next((token for token in reversed(self._pending) if token not in self._special), None)
        return last is not None and bool(_BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(last))))

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def token_fates(record: RoundRecord) -> list[tuple[int, Fate]]:
    """What a round shows, in reading order: accepted drafts (copied ones first), the others, the target's own token.

    Nothing behind a stop is in it: where the text ended inside the accepted drafts, they are all.
    """
    drafts, accepted = record.draft_tokens, record.num_accepted
    shown: list[tuple[int, Fate]] = [
        (token, "copied" if index < record.num_copied else "accepted")
        for index, token in enumerate(record.tokens[:accepted])
    ]
    if len(record.tokens) > accepted:
        shown += [(token, "rejected") for token in drafts[accepted:]]
        own: Fate = "target" if not drafts else "corrected" if accepted < len(drafts) else "bonus"
        shown.append((record.tokens[accepted], own))
    return shown


class TextStreamer:
    """A streamer for `generate` that writes the new text, a chunk per round.

    write: called with each chunk. on_start: called once, when the call has proved valid and the prompt arrives.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str], object],
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._write = write
        self._on_start = on_start
        self.started = False

    def put(self, value: Tensor) -> None:
        """The prompt, which is not written, then the committed tokens of each round, int64 [n]."""
        if self.started:
            self._show(value.tolist())
        else:
            self.started = True
            self._on_start()

    def end(self) -> None:
        """Write what was held back."""
        self._write(self._decoder.finish())

    def _show(self, tokens: list[int]) -> None:
        self._write(self._decoder.push(tokens))


class DraftStreamer(TextStreamer):
    """A streamer for `generate` that writes every token with its fate, dropped drafts included.

    write_token: called with a chunk and its fate. A character of several tokens has the fate of its last one. The chunks
    that are not "rejected", put together, are what TextStreamer writes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write_token: Callable[[str, Fate], object],
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(tokenizer, lambda text: write_token(text, "target"), on_start)
        self._write_token = write_token
        self._record: RoundRecord | None = None

    def on_round(self, record: RoundRecord) -> None:
        """The round whose tokens `put` gets next."""
        self._record = record

    def _show(self, tokens: list[int]) -> None:
        record, self._record = self._record, None
        if record is None:  # the token from prefill
            super()._show(tokens)
            return
        fates = token_fates(record)
        rejected = [token for token, fate in fates if fate == "rejected"]
        for token, fate in fates:
            if fate != "rejected":
                self._write_token(self._decoder.push([token]), fate)
            elif rejected:  # as one piece: they are text only together
                self._write_token(self._decoder.peek(rejected), fate)
                rejected = []
