"""Where the end of a text occurred before, so that what followed it there can be a draft that costs no layer.

A token adds one entry for each length of a suffix: where this suffix was seen last. So keeping the index costs the same for
every token, however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from policies import ObservationSpec, Policy
from policies.fixed import MIN_MATCH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 8
"""Tokens of the longest suffix that is looked up. A longer match is one of these, followed from token to token."""
GENERATION = 1 << 18
"""Suffixes after which the oldest ones begin to be forgotten: those of some 37,000 tokens, about 30 MB."""
BETWEEN = -1
"""Stands between the texts of a store: no token."""

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15  # odd, its bits well spread: a product's upper bits depend on all bits of the factor


class Match(NamedTuple):
    """An earlier place that ends like the text. length: tokens alike. token: what followed there."""

    length: int
    token: int


class _Places:
    """A text's tokens, and for every suffix of MIN_MATCH to LONGEST tokens the place where it was last seen to end.

    Suffixes are known by a hash of 64 bits: should two ever have the same, a draft is wrong, which verification finds out.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Take in many tokens at once."""
        first = len(self.tokens)
        self.tokens.frombytes(tokens.tobytes())
        text = (tokens + 1).astype(np.uint64)  # no token is 0, because leading zeros would vanish
        hashes = np.zeros(len(text), dtype=np.uint64)  # of the suffixes of one length, by where they end
        for length in range(1, min(LONGEST, len(text)) + 1):
            hashes = (hashes[-(len(text) + 1 - length) :] ^ text[length - 1 :]) * np.uint64(_MIX)
            if length >= MIN_MATCH:
                self._keep(zip(hashes.tolist(), range(first + length - 1, first + len(text))))
            hashes = hashes[:-1]

    def add(self, token: int, hashes: Sequence[int]) -> None:
        """Take in one token. hashes: of the suffixes that it ends."""
        place = len(self.tokens)
        self.tokens.append(token)
        self._keep((hashed, place) for hashed in hashes)

    def _keep(self, places: Iterable[tuple[int, int]]) -> None:
        if len(self._young) > GENERATION:
            self._young, self._old = {}, self._young
        self._young.update(places)

    def find(self, hashed: int) -> int:
        """Return where this suffix was last seen to end; -1 if it was not."""
        place = self._young.get(hashed, -1)
        return place if place >= 0 or not self._old else self._old.get(hashed, -1)


class CopyStore:
    """Texts to copy from besides the text itself, never changed. largest_token: of all, BETWEEN if there are none."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self.places = _Places()
        self.largest_token = BETWEEN
        for text in texts:
            self.largest_token = max(self.largest_token, *text, BETWEEN)
            self.places.extend(np.asarray([*text, BETWEEN], dtype=np.int32))

    def __len__(self) -> int:
        """Count the tokens, with one separator after each text."""
        return len(self.places.tokens)


class CopyIndex:
    """The longest suffix of a text that occurred before, and what followed it there.

    Of places where equally many tokens (up to LONGEST) are alike it takes the most recent, and the text itself before the
    store. A match longer than that is followed while it lasts: no other can then be longer.
    store: more to copy from.
    """

    def __init__(self, store: CopyStore | None = None) -> None:
        self._own = _Places()
        self._stored = None if store is None else store.places
        self._hashes: list[int] = []  # of the last 1, 2, .. LONGEST tokens
        self._from, self._place, self._length = self._own.tokens, -1, 0  # of the match: where, its last token, how many

    def __len__(self) -> int:
        """Count the tokens of the text."""
        return len(self._own.tokens)

    def read(self, tokens: Tensor) -> None:
        """Take in a prompt: int64 [n], on a CPU. Only once, before anything else."""
        assert not self._own.tokens
        if tokens.numel() == 0:
            return
        self._own.extend(tokens[:-1].numpy().astype(np.int32))
        *before, last = tokens[-LONGEST:].tolist()
        for token in before:
            self._hashes = self._hashed(token)
        self.append(last)

    def append(self, token: int) -> None:
        """Take in the next token, and look where the text ended like this before."""
        follows = self._length > 0 and self._next == token
        self._hashes = self._hashed(token)
        suffixes = self._hashes[MIN_MATCH - 1 :]
        found = None if follows and self._length >= LONGEST else self._look_up(suffixes)
        self._own.add(token, suffixes)
        if found is None or (follows and self._length + 1 > found[0]):
            self._place, self._length = self._place + 1, self._length + 1
            return
        best, place, source = found
        self._from, self._place, self._length = source, place, best
        if best == LONGEST:
            self._measure()

    def _hashed(self, token: int) -> list[int]:
        """Return the hashes of the suffixes that end with this token, from those of the suffixes before it."""
        return [(hashed ^ token + 1) * _MIX & _MASK for hashed in (0, *self._hashes[: LONGEST - 1])]

    def _look_up(self, suffixes: Sequence[int]) -> tuple[int, int, array[int]]:
        """Look up the longest suffix that was seen before: its length, where it ended, and in what."""
        best, place, source = 0, -1, self._own.tokens
        for length, hashed in enumerate(suffixes, start=MIN_MATCH):
            if (found := self._own.find(hashed)) >= 0:
                best, place, source = length, found, self._own.tokens
            elif self._stored is not None and (found := self._stored.find(hashed)) >= 0:
                best, place, source = length, found, self._stored.tokens
            else:
                break
        return best, place, source

    def _measure(self) -> None:
        """Measure a match of at least LONGEST tokens, up to four times that: a longer one is no better."""
        here, there = self._own.tokens, self._from
        end, most = len(here) - 1, min(4 * LONGEST, self._place + 1, len(here))
        while self._length < most and here[end - self._length] == there[self._place - self._length]:
            self._length += 1

    @property
    def _next(self) -> int:
        """Return the token after the match, or BETWEEN."""
        return self._from[self._place + 1]

    @property
    def match(self) -> Match | None:
        """Return the longest match of the text's end; None if there is none, or nothing followed it."""
        if not self._length or self._next == BETWEEN:
            return None
        return Match(self._length, self._next)

    def continuation(self, count: int) -> list[int]:
        """Return `count` tokens after the match, fewer at a stored text's end; a loop is copied round and round."""
        if self.match is None:
            return []
        tokens, first = self._from, self._place + 1
        copied = [*tokens[first : first + count]]
        if self._from is not self._own.tokens:
            return copied[: copied.index(BETWEEN)] if BETWEEN in copied else copied
        period = len(tokens) - first
        for index in range(len(copied), count):
            copied.append(copied[index - period])
        return copied


CopyFrom = CopyStore | Sequence[str | list[int] | Tensor]


def make_store(
    texts: Iterable[str | list[int] | Tensor], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> CopyStore:
    """Make a store of texts or token ids. Raises TypeError for others, ValueError for unknown ids or nothing to copy."""
    if isinstance(texts, (str, Tensor)):
        raise TypeError("copy_from takes a list of texts: put this one into a list")
    encoded = [_ids(text, tokenizer) for text in texts]
    if not any(len(ids) > 1 for ids in encoded):
        raise ValueError("copy_from holds no text of two tokens or more: leave it out")
    wrong = [token for ids in encoded for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"copy_from holds the token id {wrong[0]}; this model's are 0 to {vocab_size - 1}")
    return CopyStore(encoded)


def _ids(text: object, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("texts to copy from need a tokenizer: pass one to SelfSpecGenerator, or give token ids")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert isinstance(ids, list)
        return ids
    if isinstance(text, Tensor):
        text = text.flatten().tolist()
    if not isinstance(text, list) or not all(type(token) is int for token in text):
        raise TypeError(f"copy_from takes texts or lists of token ids, got {type(text).__name__}")
    return text


def copies_drafts(observes: ObservationSpec) -> bool:
    """Say whether anything is copied for a policy that needs this."""
    return observes.copies != "none"


def store_for(
    copy_from: CopyFrom | None, policy: Policy, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> CopyStore | None:
    """Give the store of one call, None for none. Raises ValueError for a policy that copies nothing, or another model's."""
    if copy_from is None:
        return None
    if not copies_drafts(policy.observes):
        raise ValueError(f"copy_from changes nothing with policy {policy.name!r}: use auto, or copy")
    if not isinstance(copy_from, CopyStore):
        return make_store(copy_from, tokenizer, vocab_size)
    if copy_from.largest_token >= vocab_size:
        largest = copy_from.largest_token
        raise ValueError(f"the store holds the token id {largest}; this model's are 0 to {vocab_size - 1}")
    return copy_from
