"""Text cut before stop strings, in whatever pieces it comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import VOCAB_SIZE, tiny_tokenizer

from selfspec.serve.trimmed_text import TrimmedText

TOKENIZER = tiny_tokenizer()
STOPS = st.lists(st.text("ab c.\n", min_size=1, max_size=4), max_size=3)
BLOCKS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4), max_size=8)


@given(stops=STOPS, blocks=BLOCKS)
def test_pieces_are_the_text_before_the_first_stop(stops: list[str], blocks: list[list[int]]) -> None:
    """The tokens end, as the engine's do, with the one that completes a stop string."""
    tokens = [token for block in blocks for token in block]
    ends = (n for n in range(len(tokens)) if any(stop in TOKENIZER.decode(tokens[:n]) for stop in stops))
    tokens = tokens[: next(ends, len(tokens))]
    text = TrimmedText(TOKENIZER, stops)
    pieces, left = [], tokens
    for block in blocks:
        pieces.append(text.push(left[: len(block)]))
        left = left[len(block) :]
    pieces.append(text.finish())
    whole = TOKENIZER.decode(tokens)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    assert "".join(pieces) == whole[: min(places, default=len(whole))]
    assert text.ended == bool(places)
    at_once = TrimmedText(TOKENIZER, stops)
    assert at_once.push(tokens) + at_once.finish() == "".join(pieces)


def test_what_may_become_a_stop_is_held_back() -> None:
    text = TrimmedText(TOKENIZER, ["be.", "."])
    a, be, dot = TOKENIZER.convert_tokens_to_ids(["a", " be", "."])
    assert text.push([a]) == "a"
    assert text.push([be]) == " "
    assert text.push([a]) == "bea"
    assert text.push([be]) == " "
    assert not text.ended
    assert text.push([dot, a]) == ""
    assert text.ended
    assert text.finish() == ""
