"""Tokens to text as they come: decoding, cutting at stop strings, and where each token came from.

Text is passed on as soon as its characters are complete. The chunks together are what the new tokens add to the prompt's
text: `tokenizer.decode(new_tokens, skip_special_tokens=True)`, and perhaps a space before it, since SentencePiece
tokenizers strip the first one of every text that they decode. transformers' TextStreamer does not give that: it waits for
spaces and decodes every line by itself, which loses the space at the beginning of a line with such tokenizers (Llama 2).
DecodeStream of tokenizers 0.23 gives other texts or raises for byte-fallback tokens, drops incomplete characters at the end,
and cannot look ahead at drafts.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from policies import RoundRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenSource = Literal["target", "accepted", "copied", "corrected", "bonus", "rejected"]
"""Where a token comes from. target: the full model, without drafts. accepted: a draft of the exit. copied: an accepted draft
that was copied from earlier text. corrected: the full model's token in place of a rejected draft. bonus: its token
after a draft that was accepted completely. rejected: a draft that was not committed."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CLEANED = 3
"""Longest end of a text that clean_up_tokenization_spaces may change with what follows: a space and two more characters."""
_MANY = 16
"""Number of pending tokens at which the decoder tries to release the first ones. No character has that many bytes."""


class IncrementalDecoder:
    """Turns tokens into text as they come, never in the middle of a character.

    Each piece is decoded together with the tokens of the piece before it, because some tokenizers strip the space at the
    beginning of a text. The cost of a token does not depend on how many came before it.
    prompt: the ids that the text follows. After a special token a text begins anew, and no space is kept.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = skipped_tokens(tokenizer)
        self._is_byte: dict[int, bool] = {}
        self._context: list[int] = []  # whose text was returned
        self._pending: list[int] = []
        self._given = 0  # characters of what is pending that were returned
        self._many = _MANY
        self._cleans = _cleans(tokenizer)
        for token in prompt[-_MANY:]:
            self._context = [] if token in self._special else [*self._context, token]
        if not self._is_settled(self._context) or self._decode(self._context).endswith(_REPLACEMENT):
            self._context = []  # ends within a character

    @property
    def num_pending(self) -> int:
        """Count the tokens whose text was not returned yet."""
        return len(self._pending)

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is now certain; "" while a character is incomplete."""
        # Skipped tokens have no text. If they were kept, every later token would decode them again.
        self._pending += [token for token in tokens if token not in self._special]
        if not self._pending or self._is_byte_token(self._pending[-1]):
            return ""
        text = self.peek([])
        if text.endswith(_REPLACEMENT):
            return self._first_part(text)
        held = self._held_from(text)
        if held < len(text):
            self._given += held
            return text[:held]
        # Tokens without text are no context for the next piece, nor those whose end another context would change.
        alone = bool(text or self._given) and self._is_settled(self._pending)
        self._context = self._pending if alone else self._context + self._pending
        self._pending, self._given, self._many = [], 0, _MANY
        return text

    def peek(self, tokens: Sequence[int]) -> str:
        """Give the text that `tokens` would add to what `push` returned, complete or not. The state does not change."""
        before = self._decode(self._context)
        return self._decode([*self._context, *self._pending, *tokens])[len(before) + self._given :]

    def finish(self) -> str:
        """Return the rest, with incomplete characters as U+FFFD. The decoder can then be used for another text."""
        text = self.peek([])
        self._context, self._pending, self._given, self._many = [], [], 0, _MANY
        return text

    def _held_from(self, text: str) -> int:
        """Return where the end of a text begins that a tokenizer may yet change: it takes the space out of " ," or " n't"."""
        # "a ' " is "a'" before a word, and "a '" before a comma.
        end = len(text) - (self._cleans and text.endswith("'"))
        while self._cleans and (space := text.rfind(" ", 0, end)) >= 0 and end - space <= _CLEANED:
            end = space
            if not text.startswith(" '", space) and not text.endswith(" ", 0, space):  # else what precedes may change
                break
        return end

    def _is_settled(self, tokens: list[int]) -> bool:
        """Return whether no later token changes the text of these by themselves."""
        return not self._cleans or self._held_from(text := self._decode(tokens)) == len(text)

    def _first_part(self, text: str) -> str:
        """Return the text of the first of many pending tokens. The last ones may be an incomplete character.

        They can be released where the text of the remaining tokens does not depend on them. Later bytes cannot change that,
        since at least as many tokens remain as a character has bytes.
        """
        if len(self._pending) < self._many or self._given:
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
        """Return whether it is a byte of SentencePiece's byte fallback. Only a complete run of them can be decoded."""
        if token not in self._is_byte:
            self._is_byte[token] = bool(_BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))))
        return self._is_byte[token]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def skipped_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the tokens that a text is decoded without, with their texts: all special ones, named or not."""
    if not tokenizer.is_fast:
        return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
    added = tokenizer.added_tokens_decoder.items()
    return {token: str(one.content) for token, one in added if one.special}


def _cleans(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether decoding takes spaces out before punctuation."""
    from tokenizers.decoders import WordPiece

    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) or isinstance(decoder, WordPiece)


def token_sources(record: RoundRecord) -> list[tuple[int, TokenSource]]:
    """List a round's tokens in reading order: accepted, then rejected drafts, the model's own. Nothing follows a stop."""
    drafts, accepted = record.draft_tokens, record.num_accepted
    fates: list[TokenSource] = ["copied" if index < record.num_copied else "accepted" for index in range(accepted)]
    shown = [*zip(record.tokens, fates)]
    if len(record.tokens) > accepted:
        shown += [(token, "rejected") for token in drafts[accepted:]]
        own: TokenSource = "target" if not drafts else "corrected" if accepted < len(drafts) else "bonus"
        shown.append((record.tokens[accepted], own))
    return shown


class SourcedText:
    """Pieces of text with their sources, which can be taken a given number of characters at a time."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[str, TokenSource]] = deque()

    def add(self, text: str, source: TokenSource) -> None:
        if text:
            self._pieces.append((text, source))

    def take(self, length: int) -> list[tuple[str, TokenSource]]:
        """Take the pieces of the next `length` characters, with the rejected drafts among and directly after them."""
        taken: list[tuple[str, TokenSource]] = []
        while self._pieces and (length or self._pieces[0][1] == "rejected"):
            text, source = self._pieces.popleft()
            if source != "rejected":
                if len(text) > length:
                    self._pieces.appendleft((text[length:], source))
                    text = text[:length]
                length -= len(text)
            taken.append((text, source))
        return taken


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Keep the text up to the first of these strings."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found, default=len(text))]


class StopCutter:
    """Passes text on up to the first stop string, `found`. What may be the beginning of one is `held` until that is clear."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held, self.found, self.ended = "", "", False

    def push(self, piece: str) -> str:
        if self.ended:
            return ""
        text = self.held + piece
        certain = before_stop(text, self.stops)
        self.ended = len(certain) < len(text)
        if self.ended:
            self.held = ""
            self.found = next((stop for stop in self.stops if text.startswith(stop, len(certain))), "")
            return certain
        longest = max(map(len, self.stops), default=0)
        starts = range(max(0, len(text) - longest), len(text))
        kept = next((at for at in starts if any(stop.startswith(text[at:]) for stop in self.stops)), len(text))
        self.held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        held, self.held = self.held, ""
        return held


class StopTrimmer:
    """Writes pieces of text with their sources up to the first stop string. Rejected drafts keep their places in between."""

    def __init__(self, stops: Sequence[str], write: Callable[[str, TokenSource], object]) -> None:
        self._cutter, self._write, self._pieces = StopCutter(stops), write, SourcedText()

    def push(self, piece: str, source: TokenSource = "target") -> None:
        if not self._cutter.ended:
            self._pieces.add(piece, source)
            self._pass_on(self._cutter.push("" if source == "rejected" else piece))

    def finish(self) -> None:
        self._pass_on(self._cutter.finish())

    def _pass_on(self, text: str) -> None:
        for piece, source in self._pieces.take(len(text)):
            self._write(piece, source)


class TextStreamer:
    """Writes the new text for `generate`, one chunk per round. on_start: called once, when the prompt arrives."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str], object],
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        self._tokenizer, self._decoder = tokenizer, IncrementalDecoder(tokenizer)
        self._write = write
        self._on_start = on_start
        self.started = False

    def put(self, value: Tensor) -> None:
        """Take the prompt first, which is not written, then the committed tokens of each round, int64 [n]."""
        if self.started:
            self._show(value.tolist())
        else:
            self.started = True
            self._decoder = IncrementalDecoder(self._tokenizer, value.flatten()[-_MANY:].tolist())
            self._on_start()

    def end(self) -> None:
        self._write(self._decoder.finish())

    def _show(self, tokens: list[int]) -> None:
        self._write(self._decoder.push(tokens))


class DraftStreamer(TextStreamer):
    """A streamer for `generate` that writes every token with its source, rejected drafts included.

    write_token: called with a chunk and its source. A character of several tokens has the source of the last one. The
    chunks that are not "rejected" together are what TextStreamer writes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write_token: Callable[[str, TokenSource], object],
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(tokenizer, lambda text: write_token(text, "target"), on_start)
        self._write_token = write_token
        self._record: RoundRecord | None = None

    def on_round(self, record: RoundRecord) -> None:
        """Keep the record of the round whose tokens `put` gets next."""
        self._record = record

    def _show(self, tokens: list[int]) -> None:
        record, self._record = self._record, None
        if record is None:  # the token from prefill
            super()._show(tokens)
            return
        sources = token_sources(record)
        rejected = [token for token, source in sources if source == "rejected"]
        for token, source in sources:
            if source != "rejected":
                self._write_token(self._decoder.push([token]), source)
            elif rejected:  # in one piece: only together they can be decoded
                self._write_token(self._decoder.peek(rejected), source)
                rejected = []
