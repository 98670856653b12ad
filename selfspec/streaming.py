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


_MANY = 16
"""Pending tokens from which on it is tried to let go of the first ones. No character has as many bytes."""


class IncrementalDecoder:
    """Turns tokens into text as they come, never in the middle of a character.

    Each piece is decoded behind the tokens of the piece before it, so that a tokenizer that strips the space in front of
    a text does not strip it from every piece. A token costs the same however many came before it, of whatever kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = _skipped(tokenizer)
        self._is_byte: dict[int, bool] = {}
        self._context: list[int] = []  # its text is out
        self._pending: list[int] = []
        self._many = _MANY

    @property
    def num_pending(self) -> int:
        """Tokens whose text is not out yet."""
        return len(self._pending)

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is now certain; "" while a character is incomplete."""
        # Tokens that are skipped have no text and change none: kept, they would be decoded again with every later token.
        self._pending += [token for token in tokens if token not in self._special]
        if not self._pending or self._is_byte_token(self._pending[-1]):
            return ""
        text = self.peek([])
        if text.endswith(_REPLACEMENT):
            return self._first_part(text)
        # Tokens without text give the next piece no left neighbour, so what was there stays.
        self._context = self._pending if text else self._context + self._pending
        self._pending, self._many = [], _MANY
        return text

    def peek(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` would add, complete or not, behind what `push` returned; nothing is kept."""
        before = self._decode(self._context)
        return self._decode([*self._context, *self._pending, *tokens])[len(before) :]

    def finish(self) -> str:
        """The rest, incomplete characters as U+FFFD; the decoder is then as new."""
        text = self.peek([])
        self._context, self._pending, self._many = [], [], _MANY
        return text

    def _first_part(self, text: str) -> str:
        """Of many pending tokens that end in what may be an incomplete character: the text of the first ones.

        They may go where the text of what is left is the same with and without them. Bytes that follow cannot change that,
        for at least as many tokens are left as a character has bytes.
        """
        if len(self._pending) < self._many:
            return ""
        before = len(self._decode(self._context))
        for cut in range(len(self._pending) - 4, len(self._pending) - 12, -1):
            first, left = self._pending[:cut], self._pending[cut:]
            if self._is_byte_token(first[-1]):
                continue
            done, context = self._decode([*self._context, *first])[before:], first[-_MANY:]
            seen, whole = self._decode(context), self._decode([*context, *left])
            if whole.startswith(seen) and text == done + whole[len(seen) :]:
                self._context, self._pending, self._many = context, left, _MANY
                return done
        self._many *= 2
        return ""

    def _is_byte_token(self, token: int) -> bool:
        """Whether it is one of SentencePiece's bytes: only a run of them as a whole is text or is not."""
        if token not in self._is_byte:
            self._is_byte[token] = bool(_BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))))
        return self._is_byte[token]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _skipped(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that `skip_special_tokens` leaves out."""
    if not tokenizer.is_fast:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)


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
