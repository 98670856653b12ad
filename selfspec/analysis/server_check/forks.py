"""Where two texts part, which tokens they took there, and whether the model was undecided between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from selfspec.analysis.server_check.client import ScoredToken

_SHOWN_CHARACTERS = 12  # of texts whose tokens are unknown
_END_TOKEN = re.compile(rb"<\|.*\|>|</s>|<eos>|<end_of_turn>|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The first place where a text differs from the one it should equal.

    character: index into both texts. token: index of the token there, None if the server gave no tokens.
    expected, got: the two tokens, or a few characters of each text where a token is unknown. Empty: the text ended.
    expected_logprob, got_logprob: natural; of one pass of the model, by the server. None if unknown.
    near_tie: whether they are closer than the tolerance; None if one is unknown.
    """

    character: int
    token: int | None
    expected: str
    got: str
    expected_logprob: float | None
    got_logprob: float | None
    near_tie: bool | None


def find_fork(expected: str, got: str, near_tie: float, tokens: Sequence[ScoredToken] | None = None) -> Fork | None:
    """Compare two texts; None if they are equal.

    tokens: of the expected text. The other text's token is looked for among the likeliest ones at that position: the longest
        one with which the other text goes on. near_tie: largest difference of two log probabilities, in nats.
    """
    if expected == got:
        return None
    known = tokens or ()
    character = _common(expected, got)
    wanted, other = expected.encode(errors="replace"), got.encode(errors="replace")
    position = len(expected[:character].encode(errors="replace"))
    shown = [text[character : character + _SHOWN_CHARACTERS] for text in (expected, got)]
    place = _token_at(known, wanted, position)
    if place is None or is_after_sampling(known):
        return Fork(
            character=character,
            token=place[0] if place else None,
            expected=shown[0],
            got=shown[1],
            expected_logprob=None,
            got_logprob=None,
            near_tie=None,
        )
    index, taken = _taken(known, place, position, other)
    token = known[index]
    return Fork(
        character=character,
        token=index,
        expected=token.text.decode(errors="replace"),
        got=shown[1] if taken is None else taken[0].decode(errors="replace"),
        expected_logprob=token.logprob,
        got_logprob=None if taken is None else taken[1],
        near_tie=None if taken is None else abs(token.logprob - taken[1]) <= near_tie,
    )


def _taken(
    tokens: Sequence[ScoredToken], place: tuple[int, int], position: int, other: bytes
) -> tuple[int, tuple[bytes, float] | None]:
    """Index of the token where the texts parted, and what the other text took there, of the likeliest tokens.

    Two tokens may begin with the same characters. So where none of the likeliest tokens at the place is in the other text,
    the token before may have been another one already, if it reaches over the first character that differs.
    """
    index, start = place
    taken = _in_text(tokens[index], other[start:], 1)
    if taken is None and index > 0 and start >= len(tokens[index - 1].text):
        earlier = start - len(tokens[index - 1].text)
        taken = _in_text(tokens[index - 1], other[earlier:], position - earlier + 1)
        if taken is not None:
            return index - 1, taken
    return index, taken


def _in_text(token: ScoredToken, rest: bytes, least: int) -> tuple[bytes, float] | None:
    """The longest other token at this position, of at least so many bytes, with which the rest of a text begins.

    Where a text ends, that is a token that ends texts.
    """
    others = [item for item in token.top if item[0] != token.text]
    if not rest:
        return next((item for item in others if _END_TOKEN.fullmatch(item[0])), None)
    fitting = [item for item in others if len(item[0]) >= least and rest.startswith(item[0])]
    return max(fitting, key=lambda item: len(item[0]), default=None)


def is_after_sampling(tokens: Sequence[ScoredToken]) -> bool:
    """Whether all chosen tokens have probability 1: those of the greedy choice itself, which say nothing of near-ties."""
    return bool(tokens) and all(token.logprob > -1e-9 for token in tokens)


def logprob_differences(left: Sequence[ScoredToken], right: Sequence[ScoredToken]) -> list[float]:
    """Of each token's log probabilities, up to the first token that differs."""
    equal = takewhile(lambda pair: pair[0].text == pair[1].text, zip(left, right))
    return [abs(a.logprob - b.logprob) for a, b in equal]


def _common(left: str, right: str) -> int:
    """Number of characters with which both texts begin."""
    return next((index for index, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def _token_at(tokens: Sequence[ScoredToken], text: bytes, position: int) -> tuple[int, int] | None:
    """Index and first byte of the token that holds this byte of the text; None if the tokens are not those of the text."""
    start = 0
    for index, token in enumerate(tokens):
        written = token.text
        if index == 0 and not text.startswith(written):  # a leading space that the server strips
            written = written.lstrip()
        if start == len(text) == position:
            return index, start  # the text's end, for which the server gave a token
        if not text.startswith(written, start):
            return None
        if position < start + len(written):
            return index, start
        start += len(written)
    return None
